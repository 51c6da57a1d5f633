"""Flight recorder: writes the last collectives of every process group to a file, to diagnose a hang.

Gloo always keeps the record, NCCL only if `BUFFER` is set before the groups are made. Reading it takes no collective
and, as a blocked collective releases the interpreter lock, any thread can do it while the main thread hangs.
"""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from nsa.files import write_atomic

BUFFER = "TORCH_FR_BUFFER_SIZE"
_ENTRIES = "2000"
_DUMPS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""The second exists in builds with CUDA."""


def enable_flight_recorder() -> None:
    """Before the process groups are made."""
    os.environ.setdefault(BUFFER, _ENTRIES)


def write_flight_record(path: Path) -> bool:
    """Atomic; False where there are no process groups."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    c10d = torch._C._distributed_c10d
    record = {backend: json.loads(getattr(c10d, dump)()) for backend, dump in _DUMPS.items() if hasattr(c10d, dump)}
    write_atomic(path, json.dumps(record, indent=1) + "\n")
    return True
