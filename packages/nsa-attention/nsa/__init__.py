"""Native Sparse Attention: a library, a trainer and command-line tools.

The public names below are imported on first use: `import nsa` itself loads neither torch nor configuration.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nsa.core.attention_config import AttentionConfig
    from nsa.core.functional import (
        block_sparse_attention,
        compress_blocks,
        compressed_attention,
        nsa_attention,
        select_blocks,
        selected_attention,
        sliding_attention,
    )
    from nsa.core.model_layers import NSACache
    from nsa.core.nsa_attention import NSAAttention
    from nsa.geometry import Geometry
    from nsa.model.transformer import NSATransformer

__version__ = "0.2.0"

_HOMES = {
    "AttentionConfig": "nsa.core.attention_config",
    "Geometry": "nsa.geometry",
    "NSAAttention": "nsa.core.nsa_attention",
    "NSACache": "nsa.core.model_layers",
    "NSATransformer": "nsa.model.transformer",
    "block_sparse_attention": "nsa.core.functional",
    "compress_blocks": "nsa.core.functional",
    "compressed_attention": "nsa.core.functional",
    "nsa_attention": "nsa.core.functional",
    "select_blocks": "nsa.core.functional",
    "selected_attention": "nsa.core.functional",
    "sliding_attention": "nsa.core.functional",
}

__all__ = [
    "AttentionConfig",
    "Geometry",
    "NSAAttention",
    "NSACache",
    "NSATransformer",
    "__version__",
    "block_sparse_attention",
    "compress_blocks",
    "compressed_attention",
    "nsa_attention",
    "select_blocks",
    "selected_attention",
    "sliding_attention",
]


def __getattr__(name: str) -> object:
    """Import a public name from its module on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'nsa' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
