"""Child process of `nsa gpu-check`: runs the checks and writes each result to a pipe at once.

An illegal access leaves a GPU's context unusable, and a hang cannot be ended from inside, so the parent (`runner`)
starts a new child after a failure.
"""

import json
import os
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import torch

from nsa.verify.gpu_check.check_result import CheckResult
from nsa.verify.gpu_check.runner import check_sizes, select_checks


def main(arguments: str) -> None:
    """`arguments`: JSON with the pipe to write to, what to run, and the first check."""
    to, rehearse, full, only, first = (
        json.loads(arguments)[key] for key in ("to", "rehearse", "full", "only", "first")
    )
    torch.set_float32_matmul_precision("highest")  # no TF32 in what kernels are compared with
    with os.fdopen(to, "w", encoding="utf-8") as pipe:

        def write(**message: Any) -> None:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()

        for number, check in enumerate(select_checks(check_sizes(rehearse=rehearse, full=full), only)):
            if number < first:
                continue
            write(kind="begin", number=number)
            begin = time.perf_counter()
            for result in check.run():
                if isinstance(result, CheckResult):
                    now = time.perf_counter()
                    write(kind="result", result=asdict(replace(result, subject=check.subject, seconds=now - begin)))
                    begin = now
                else:
                    write(kind="measured", measured=asdict(result))
        write(kind="done")


if __name__ == "__main__":
    main(sys.argv[1])
