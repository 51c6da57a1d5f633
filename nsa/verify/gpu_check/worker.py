"""The process that runs the checks and writes each result down at once: its death loses only the check it was in.

An illegal access leaves a GPU's context unusable, and a hang cannot be ended from inside: so whoever wants to go on
after a failure has to be another process (`runner`).
"""

import json
import os
import sys
import time
from dataclasses import asdict, replace
from typing import Any

import torch

from nsa.verify.gpu_check.check_result import CheckResult
from nsa.verify.gpu_check.program import program, scope_of


def main(asked: str) -> None:
    """`asked`: where to write, what to run, which check to begin with."""
    to, rehearse, full, only, first = (json.loads(asked)[key] for key in ("to", "rehearse", "full", "only", "first"))
    torch.set_float32_matmul_precision("highest")  # fp32 is fp32: no TF32 in what kernels are compared with
    with os.fdopen(to, "w", encoding="utf-8") as pipe:

        def write(**message: Any) -> None:
            pipe.write(json.dumps(message) + "\n")
            pipe.flush()

        for number, check in enumerate(program(scope_of(rehearse=rehearse, full=full), only)):
            if number < first:
                continue
            write(kind="begin", number=number)
            begin = time.perf_counter()
            for result in check.run():
                if isinstance(result, CheckResult):
                    now = time.perf_counter()
                    write(kind="row", row=asdict(replace(result, subject=check.subject, seconds=now - begin)))
                    begin = now
                else:
                    write(kind="measured", measured=asdict(result))
        write(kind="done")


if __name__ == "__main__":
    main(sys.argv[1])
