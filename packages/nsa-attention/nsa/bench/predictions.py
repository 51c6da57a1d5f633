"""Modelled kernel times on GPUs, from the table that `python -m proofs.perf_model.write_predictions` writes.

Time on the host and launches that the GPU waits for are not in them.
"""

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

PREDICTIONS = Path(__file__).with_name("predictions.json")


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(PREDICTIONS.read_text(encoding="utf-8"))
    return table


@cache
def predictions() -> dict[tuple[str, int, str, bool], dict[str, float]]:
    """Modelled seconds, dense seconds and their ratio, by GPU, length, dtype and whether the backward pass is in it."""
    return {
        (e["gpu"], e["length"], e["dtype"], e["backward"]): dict(
            seconds=e["seconds"], dense_seconds=e["dense_seconds"], ratio=e["dense_seconds"] / e["seconds"]
        )
        for e in _table()["entries"]
    }


@cache
def kernel_predictions() -> dict[tuple[str, str, int], dict[str, float]]:
    """Modelled seconds of each kernel, both passes in bf16, by GPU, name of the shape and length."""
    return {(e["gpu"], e["shape"], e["length"]): e["kernels"] for e in _table()["kernels"]}


def gpu_of_model(gpu_name: str) -> str:
    """The modelled GPU that a device's name contains as a word; empty if it is not modelled."""
    modelled = {gpu for gpu, *_ in predictions()}
    return next((word for word in re.findall(r"[a-z0-9]+", gpu_name.lower()) if word in modelled), "")
