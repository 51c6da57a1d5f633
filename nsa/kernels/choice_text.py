"""Text about the chosen kernel backends: one line for logs, and a warning where a slow backend runs for want of a fast
one. Used by `nsa train`, heartbeats and `nsa doctor`.
"""

import re
from collections.abc import Sequence

from nsa.kernels.registry import BACKENDS, BackendChoice

_FASTEST = {"cpu": "cpu", "cuda": "triton"}
"""By device type, the backend that trains fastest there."""
_NAMES = {"cpu": "cpu (C++)"}
REQUESTED, _FIRST_CHOICE = "requested by name", "first choice"
_PASSED_OVER = re.compile(rf"; (?=(?:{'|'.join(BACKENDS)}): )")
_COST = {
    "cpu": "Training is about 3 to 5 times slower (measured on 2 cores)",
    "cuda": "Training is several times slower (modelled for a 125M model on an A100: 4 to 15 thousand tokens/s; "
    "`nsa estimate` compares the backends)",
}


def kernels_text(choices: Sequence[BackendChoice]) -> str:
    """The backends of a run and the reasons: once if they are the same in all branches, else per branch."""
    if len({(choice.backend, choice.reason) for choice in choices}) > 1:
        return " · ".join(f"{choice.branch} {_describe(choice)}" for choice in choices)
    first = choices[0]
    if first.reason == _FIRST_CHOICE:
        return f"{_name(first)}, all branches"
    passed_over = any(why_passed_over(first, backend) for backend in BACKENDS)
    return f"{_name(first)}, all branches ({first.reason})" if passed_over else f"{_name(first)}, {first.reason}"


def reason_text(choices: Sequence[BackendChoice]) -> str:
    """The reasons alone: once if all branches have the same."""
    if len({choice.reason for choice in choices}) == 1:
        return choices[0].reason
    return "; ".join(f"{choice.branch}: {choice.reason}" for choice in choices)


def slow_kernels_warning(choices: Sequence[BackendChoice], device_type: str) -> str | None:
    """Which branches run on a slow backend that nobody requested, why, and what it costs; None if there are none."""
    fastest = _FASTEST.get(device_type)
    slow = [choice for choice in choices if choice.backend != fastest and choice.reason != REQUESTED]
    if fastest is None or not slow:
        return None
    branches = "all branches run" if len(slow) == len(choices) else f"{', '.join(c.branch for c in slow)}: this runs"
    why = dict.fromkeys(why_passed_over(choice, fastest) or "it runs only when requested by name" for choice in slow)
    backends = ", ".join(dict.fromkeys(choice.backend for choice in slow))
    reason = f"{branches} on the {backends} backend, not on {fastest}: {'; '.join(why)}"
    return f"slow kernels: {reason}. {_COST[device_type]}."


def why_passed_over(choice: BackendChoice, backend: str) -> str | None:
    """The part of a choice's reason that is about this backend; None if it says nothing of it."""
    parts = _PASSED_OVER.split(choice.reason)
    return next((part.removeprefix(f"{backend}: ") for part in parts if part.startswith(f"{backend}: ")), None)


def _describe(choice: BackendChoice) -> str:
    return _name(choice) if choice.reason == _FIRST_CHOICE else f"{_name(choice)} ({choice.reason})"


def _name(choice: BackendChoice) -> str:
    return _NAMES.get(choice.backend, choice.backend)
