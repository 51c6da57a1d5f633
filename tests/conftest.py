"""Two test processes share two cores: one thread each, or they spin against each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
pytest_plugins = ["tools.ptx_emulator.pytest_plugin"]  # active if NSA_EMULATE names a GPU
