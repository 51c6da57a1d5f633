"""Settings of the test processes: one thread each, and SIGINT as in a terminal."""

import os
import signal
from importlib.util import find_spec

# Two test processes share two cores: with more threads they spin against each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts background jobs with SIGINT ignored, which their children inherit: tests that send it would wait.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
pytest_plugins = ["tools.ptx_emulator.pytest_plugin"]  # active if NSA_EMULATE names a GPU
# vLLM has an environment of its own (.ci/install-vllm), in which CI runs these.
collect_ignore = [] if find_spec("vllm") else ["vllm"]
