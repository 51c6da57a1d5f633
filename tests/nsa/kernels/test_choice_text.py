"""Text for users about the chosen backends."""

from nsa.kernels.choice_text import kernels_text, reason_text, slow_kernels_warning
from nsa.kernels.registry import BRANCHES, BackendChoice, PassedOver

NO_COMPILER = PassedOver("cpu", "no C++ compiler (g++ or clang++) on PATH; install one, e.g. apt-get install g++")


def choices(backend="cpu", *passed_over, **why):
    return tuple(BackendChoice(branch, backend, passed_over, **why) for branch in BRANCHES)


def with_one(choice):
    """The first choice in the other branches."""
    return tuple(choice if choice.branch == branch else BackendChoice(branch, "cpu") for branch in BRANCHES)


def test_one_backend_in_all_branches_is_one_short_line():
    assert kernels_text(choices()) == "cpu (C++), all branches"
    assert kernels_text(choices("triton", verified=True)) == "triton, verified on this GPU"
    assert kernels_text(choices("portable", requested=True)) == "portable, requested by name"
    assert kernels_text(choices("portable", NO_COMPILER)) == f"portable, all branches (cpu: {NO_COMPILER.why})"


def test_backends_that_differ_are_listed_per_branch_with_their_reasons():
    mixed = with_one(BackendChoice("selected", "reference", requested=True))
    assert kernels_text(mixed) == (
        "compressed cpu (C++) · select cpu (C++) · selected reference (requested by name) · sliding cpu (C++)"
    )
    assert reason_text(mixed).split("; ")[2] == "selected: requested by name"
    assert reason_text(choices()) == "first choice"


def test_a_slow_backend_that_nobody_requested_is_warned_about_with_reason_and_fix():
    warning = slow_kernels_warning(choices("portable", NO_COMPILER, PassedOver("triton", "it runs on a GPU")), "cpu")
    assert warning.startswith("slow kernels: all branches run on the portable backend, not on cpu: no C++ compiler")
    assert "install one, e.g. apt-get install g++. Training is" in warning
    assert "it runs on a GPU" not in warning
    failed = PassedOver("triton", "its check on this GPU failed, see /cache/evidence.json")
    on_gpu = slow_kernels_warning(choices("portable", PassedOver("cpu", "it runs on a CPU"), failed), "cuda")
    assert "not on triton: its check on this GPU failed, see /cache/evidence.json. Training" in on_gpu
    assert "it runs on a CPU" not in on_gpu


def test_only_the_slow_branches_are_named():
    warning = slow_kernels_warning(with_one(BackendChoice("select", "portable", (PassedOver("cpu", "broken"),))), "cpu")
    assert "select: this runs on the portable backend, not on cpu: broken" in warning


def test_fast_and_requested_backends_are_not_warned_about():
    assert slow_kernels_warning(choices(), "cpu") is None
    assert slow_kernels_warning(choices("triton", verified=True), "cuda") is None
    assert slow_kernels_warning(choices("portable", requested=True), "cuda") is None
    slower = PassedOver("triton", "right, but slower on this GPU: 9 ms", slower=True)
    assert slow_kernels_warning(choices("portable", slower), "cuda") is None


def test_devices_without_fast_kernels_are_warned_about():
    portable = choices("portable", PassedOver("cpu", "it runs on a CPU"))
    assert "none of the fast backends runs on mps" in slow_kernels_warning(portable, "mps")
    assert slow_kernels_warning(choices("portable", requested=True), "xpu") is None
