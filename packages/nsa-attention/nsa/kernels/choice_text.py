"""Text about the chosen kernel backends: one line for logs, and a warning where a slow backend runs for want of a fast
one. Used by `nsa train`, heartbeats and `nsa doctor`.
"""

from collections.abc import Sequence

from nsa.kernels.registry import BackendChoice

_FASTEST = {"cpu": "cpu", "cuda": "triton"}
"""By device type, the backend that trains fastest there."""
_NAMES = {"cpu": "cpu (C++)"}
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
    if first.requested or first.verified:
        return f"{_name(first)}, {first.reason}"
    return f"{_name(first)}, all branches" + (f" ({first.reason})" if first.passed_over else "")


def reason_text(choices: Sequence[BackendChoice]) -> str:
    """The reasons alone: once if all branches have the same."""
    if len({choice.reason for choice in choices}) == 1:
        return choices[0].reason
    return "; ".join(f"{choice.branch}: {choice.reason}" for choice in choices)


def slow_kernels_warning(choices: Sequence[BackendChoice], device_type: str) -> str | None:
    """Warn which branches run on a slow backend without a request, why, and what it costs; None if none does."""
    fastest = _FASTEST.get(device_type, "")
    slow = [c for c in choices if c.backend != fastest and not (c.requested or c.is_fastest)]
    if not slow or device_type == "meta":
        return None
    if not fastest:
        return (
            f"slow kernels: none of the fast backends runs on {device_type}, where PyTorch's operators compute every "
            f"branch (portable). Train and serve on a CPU, or on a GPU of NVIDIA or AMD."
        )
    branches = "all branches run" if len(slow) == len(choices) else f"{', '.join(c.branch for c in slow)}: this runs"
    why = dict.fromkeys(choice.why_not(fastest) or "it runs only when requested by name" for choice in slow)
    backends = ", ".join(dict.fromkeys(choice.backend for choice in slow))
    reason = f"{branches} on the {backends} backend, not on {fastest}: {'; '.join(why)}"
    return f"slow kernels: {reason}. {_COST[device_type]}."


def _describe(choice: BackendChoice) -> str:
    is_first = not (choice.requested or choice.verified or choice.passed_over)
    return _name(choice) if is_first else f"{_name(choice)} ({choice.reason})"


def _name(choice: BackendChoice) -> str:
    return _NAMES.get(choice.backend, choice.backend)
