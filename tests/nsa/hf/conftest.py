"""Transformers must not ask the network for anything."""

import pytest


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
