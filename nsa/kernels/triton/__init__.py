"""GPU kernels in Triton: any heads per group, packed documents, no atomics. Imported when first called.

`{sliding,compressed,selected}_{forward,backward}` and `select` with the signatures of `nsa.kernels.portable`.
"""

from typing import Any

_HOMES = {
    "sliding_forward": "runs",
    "sliding_backward": "runs",
    "compressed_forward": "runs",
    "compressed_backward": "runs",
    "selected_forward": "selected",
    "selected_backward": "selected",
    "select": "select",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(name)
    from importlib import import_module

    return getattr(import_module(f"nsa.kernels.triton.{_HOMES[name]}"), name)
