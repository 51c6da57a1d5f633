"""Engine of vLLM on this machine's CPU: in one process, without threads of its own. Needs the environment that
`.ci/install-vllm` makes; without vLLM nothing here is collected (tests/conftest.py)."""

import os

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
)
