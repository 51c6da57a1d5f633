"""What the process groups of a rank last did, for a run that hangs: torch's flight recorder as a file.

Gloo keeps the record always, NCCL if `BUFFER` is set before the groups are made. Reading it takes no collective and, as
a blocked collective lets go of the interpreter, any thread can do it while the main one hangs.
"""

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from nsa.files import write_atomic

BUFFER = "TORCH_FR_BUFFER_SIZE"
_BUFFERED = "2000"
_DUMPS = {"gloo": "_dump_fr_trace_json", "nccl": "_dump_nccl_trace_json"}
"""The second exists in builds with CUDA."""


def keep_record() -> None:
    os.environ.setdefault(BUFFER, _BUFFERED)


def write_record(path: Path) -> bool:
    """Whole or not at all; False where there are no process groups."""
    if not dist.is_available() or not dist.is_initialized():
        return False
    c10d = torch._C._distributed_c10d
    record = {backend: json.loads(getattr(c10d, dump)()) for backend, dump in _DUMPS.items() if hasattr(c10d, dump)}
    write_atomic(path, json.dumps(record, indent=1) + "\n")
    return True
