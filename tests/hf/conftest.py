"""Transformers must not ask the network for anything."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
