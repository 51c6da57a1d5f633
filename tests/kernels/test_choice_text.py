"""What a user reads about the chosen backends."""

from nsa.kernels.choice_text import kernels_text, reason_text, slow_kernels_warning
from nsa.kernels.registry import BRANCHES, BackendChoice

NO_COMPILER = "cpu: no C++ compiler (g++ or clang++) on PATH; install one, e.g. apt-get install g++"


def choices(backend="cpu", reason="first choice", **others):
    return tuple(BackendChoice(branch, *others.get(branch, (backend, reason))) for branch in BRANCHES)


def test_one_backend_in_all_branches_is_one_short_line():
    assert kernels_text(choices()) == "cpu (C++), all branches"
    assert kernels_text(choices("triton", "verified on this GPU")) == "triton, verified on this GPU"
    assert kernels_text(choices("portable", "requested by name")) == "portable, requested by name"
    assert kernels_text(choices("portable", NO_COMPILER)) == f"portable, all branches ({NO_COMPILER})"


def test_backends_that_differ_are_listed_per_branch_with_their_reasons():
    mixed = choices(selected=("reference", "requested by name"))
    assert kernels_text(mixed) == (
        "compressed cpu (C++) · select cpu (C++) · selected reference (requested by name) · sliding cpu (C++)"
    )
    assert reason_text(mixed).split("; ")[2] == "selected: requested by name"
    assert reason_text(choices()) == "first choice"


def test_a_slow_backend_that_nobody_requested_is_warned_about_with_reason_and_fix():
    warning = slow_kernels_warning(choices("portable", f"{NO_COMPILER}; triton: it runs on a GPU, not on cpu"), "cpu")
    assert warning.startswith("slow kernels: all branches run on the portable backend, not on cpu: no C++ compiler")
    assert "install one, e.g. apt-get install g++. Training is" in warning
    assert "it runs on a GPU" not in warning
    reason = "cpu: it runs on a CPU, not on cuda; triton: its check on this GPU failed, see /cache/evidence.json"
    on_gpu = slow_kernels_warning(choices("portable", reason), "cuda")
    assert "not on triton: its check on this GPU failed, see /cache/evidence.json. Training" in on_gpu
    assert "it runs on a CPU" not in on_gpu


def test_only_the_slow_branches_are_named():
    warning = slow_kernels_warning(choices(select=("portable", "cpu: broken")), "cpu")
    assert "select: this runs on the portable backend, not on cpu: broken" in warning


def test_fast_and_requested_backends_are_not_warned_about():
    assert slow_kernels_warning(choices(), "cpu") is None
    assert slow_kernels_warning(choices("triton", "verified on this GPU"), "cuda") is None
    assert slow_kernels_warning(choices("portable", "requested by name"), "cuda") is None
    assert slow_kernels_warning(choices("portable", "cpu: it runs on a CPU"), "mps") is None
