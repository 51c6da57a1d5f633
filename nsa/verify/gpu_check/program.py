"""The checks in their order."""

from collections.abc import Iterable

import torch

from nsa.errors import ConfigError
from nsa.verify.gpu_check import autocast, causality, compiled, decode, determinism, environment, parity, speed
from nsa.verify.gpu_check.check_result import GpuCheck
from nsa.verify.gpu_check.sizes import CheckSizes, on_gpu, rehearsal

SUBJECTS = {
    "environment": environment, "parity": parity, "autocast": autocast, "causality": causality,
    "determinism": determinism, "compile": compiled, "decode": decode, "speed": speed,
}  # fmt: skip


def scope_of(*, rehearse: bool, full: bool) -> CheckSizes:
    return rehearsal(full=full) if rehearse else on_gpu(torch.device("cuda"), full=full)


def program(scope: CheckSizes, only: Iterable[str] = ()) -> list[GpuCheck]:
    wanted = list(only) or list(SUBJECTS)
    for name in wanted:
        if name not in SUBJECTS:
            raise ConfigError(f"--only is {name!r}: there is no such subject. Use one of: {', '.join(SUBJECTS)}.")
    if "speed" in only and not scope.full:
        raise ConfigError("--only speed without --full times nothing: the benchmark is what --full adds. Add --full.")
    return [check for name, module in SUBJECTS.items() if name in wanted for check in module.checks(scope)]
