"""The self-check's child process: compiles the kernels, compares them, and writes each figure to a pipe at once.

    python -m nsa.kernels.self_check.worker ARGUMENTS

`ARGUMENTS`: JSON with the pipe to write to, device, name of the GPU, dtype, shape, geometry, parts to check (all if
empty), whether tiles are timed, and the kernel cache folder.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from nsa.geometry import Geometry
from nsa.kernels.cpu.build import set_cache_folder
from nsa.kernels.interface import KernelShape
from nsa.kernels.self_check import checks
from nsa.kernels.self_check.cases import check_sizes
from nsa.kernels.self_check.compile_ahead import compile_ahead
from nsa.kernels.triton.tile_store import set_tuning

BACKEND = "triton"
_MOST_THREADS = 16  # of the reference


def main(arguments: str) -> None:
    request = json.loads(arguments)
    with os.fdopen(request["to"], "w", encoding="utf-8") as pipe:

        def write(**message: Any) -> None:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()

        _check(request, write)
        write(kind="done")


def _check(given: dict[str, Any], write: Any) -> None:
    began = time.perf_counter()
    device, dtype = torch.device(given["device"]), getattr(torch, given["dtype"])
    set_cache_folder(Path(given["folder"]))
    set_tuning(given["tuned"])
    torch.set_float32_matmul_precision("highest")  # no TF32 in what kernels are compared with
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.set_num_threads(min(_MOST_THREADS, len(os.sched_getaffinity(0))))  # the other processes of a node wait
        torch.cuda.set_device(device)
        seen = torch.cuda.get_device_name(device)
        if seen != given["gpu"]:
            raise RuntimeError(f"{device} is {seen} in the child process and {given['gpu']} in its parent")
    groups, heads, d_k, d_v = given["shape"]
    shape = KernelShape(groups, heads, d_k, d_v, Geometry.from_ints(given["geometry"]))
    sizes = check_sizes(shape, small=not on_gpu)
    _use_pieces(sizes.piece)
    write(kind="seconds", what="start", seconds=time.perf_counter() - began)
    began = time.perf_counter()
    if on_gpu and not given["tuned"]:
        write(kind="begin", part="compiling")
        compile_ahead(sizes, device, dtype, _MOST_THREADS)
        write(kind="seconds", what="compiling", seconds=time.perf_counter() - began)
    for part in checks.parts(sizes, device, dtype, BACKEND):
        if given["parts"] and part.name not in given["parts"]:
            continue
        began = time.perf_counter()
        write(kind="begin", part=part.name)
        verdict = checks.check_part(part, device)
        write(kind="figures", figures=[vars(figure) for figure in verdict])
        write(kind="seconds", what=part.name, seconds=time.perf_counter() - began)


def _use_pieces(piece: int) -> None:
    from nsa.kernels.triton import block_index

    block_index.PIECE = piece


if __name__ == "__main__":
    main(sys.argv[1])
