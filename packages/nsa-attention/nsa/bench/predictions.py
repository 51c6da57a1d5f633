"""Modelled kernel times on GPUs, from the table that `python -m proofs.perf_model.write_predictions` writes."""

import json
from functools import cache
from pathlib import Path

PREDICTIONS = Path(__file__).with_name("predictions.json")


@cache
def predictions() -> dict[tuple[str, int, str, bool], dict[str, float]]:
    """Modelled seconds, dense seconds and their ratio, by GPU, length, dtype and whether the backward pass is in it."""
    return {
        (e["gpu"], e["length"], e["dtype"], e["backward"]): dict(
            seconds=e["seconds"], dense_seconds=e["dense_seconds"], ratio=e["dense_seconds"] / e["seconds"]
        )
        for e in json.loads(PREDICTIONS.read_text(encoding="utf-8"))["entries"]
    }
