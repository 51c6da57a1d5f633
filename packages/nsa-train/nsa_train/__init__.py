"""Training, conversion, evaluation and serving of language models with Native Sparse Attention; the command `nsa`.

`NSAMixerConfig`, the attention as a sequence mixer of OLMo-core, is imported on first use: `import nsa_train` itself
loads neither torch nor the engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsa_train.train.engine.mixer import NSAMixerConfig

__version__ = "0.2.0"

_HOMES = {"NSAMixerConfig": "nsa_train.train.engine.mixer"}

__all__ = ["NSAMixerConfig", "__version__"]


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'nsa_train' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
