"""Plugin for vLLM: `register` is the entry point `vllm.general_plugins`, called in every process of vLLM.

vLLM schedules, batches, keeps the pages and serves; the attention is computed by this package's own kernels.
"""

import logging

ARCHITECTURE = "NSAForCausalLM"


def register() -> None:
    """Register the model with vLLM and Transformers. May be called more than once.

    Never raises: an exception here would stop every vLLM server of the environment, whatever its model.
    """
    try:
        from vllm import ModelRegistry

        import nsa.hf  # noqa: F401 (registers the config with Transformers)

        if ARCHITECTURE not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(ARCHITECTURE, "nsa.vllm.model:PagedForCausalLM")
    except Exception:
        logging.getLogger("vllm.nsa").exception("models of nsa-train cannot be served: the plugin did not load")
