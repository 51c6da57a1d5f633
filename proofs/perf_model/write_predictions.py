"""Write the modelled times that `nsa gpu-check` shows beside measured ones: nsa/bench/predictions.json.

`nsa estimate` uses them, too.

    python -m proofs.perf_model.write_predictions

A few minutes: the kernels are compiled for three GPUs, and the selection is measured at every length.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from nsa.bench.case import SHAPES
from nsa.bench.predictions import PREDICTIONS
from nsa.check.cases import KERNEL_LENGTHS, TIMED_LAYERS, on_gpu
from proofs.perf_model.gpus import GPUS
from proofs.perf_model.prediction import by_launch_name, predict
from proofs.perf_model.selection_overlap import measure_overlap

SPEED = on_gpu(torch.device("cuda"), full=True).speed
"""The shape, lengths and dtypes that `nsa gpu-check --full` times."""


def entries(
    gpus: Sequence[str] = tuple(GPUS),
    lengths: Sequence[int] = SPEED.lengths,
    dtypes: Sequence[str] = SPEED.dtypes,
) -> Iterator[dict[str, Any]]:
    shape = SHAPES[SPEED.shape_name]
    for length in lengths:
        overlap = measure_overlap(shape, length)
        for gpu in gpus:
            for dtype in dtypes:
                for backward in (False, True):
                    p = predict(gpu, shape, length, dtype, backward, overlap)
                    yield dict(
                        gpu=gpu, length=length, dtype=dtype, backward=backward, seconds=_rounded(p.seconds),
                        dense_seconds=_rounded(p.dense_seconds),
                    )  # fmt: skip


def kernels(
    gpus: Sequence[str] = tuple(GPUS),
    names: Sequence[str] = TIMED_LAYERS,
    lengths: Sequence[int] = KERNEL_LENGTHS,
) -> Iterator[dict[str, Any]]:
    """Both passes in bf16, by the names that kernels have on a GPU."""
    for name in names:
        for length in lengths:
            overlap = measure_overlap(SHAPES[name], length)
            for gpu in gpus:
                p = predict(gpu, SHAPES[name], length, "bf16", True, overlap)
                yield dict(gpu=gpu, shape=name, length=length, kernels=by_launch_name(p, _rounded))


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.4g}")


def main() -> None:
    lines, of_kernels = (",\n  ".join(json.dumps(entry) for entry in some) for some in (entries(), kernels()))
    head = f'{{\n "written_by": "python -m proofs.perf_model.write_predictions",\n "shape": "{SPEED.shape_name}",\n'
    body = f' "entries": [\n  {lines}\n ],\n "kernels": [\n  {of_kernels}\n ]\n}}\n'
    PREDICTIONS.write_text(head + body, encoding="utf-8")
    print(f"wrote {PREDICTIONS.name}")


if __name__ == "__main__":
    main()
