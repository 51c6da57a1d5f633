"""Initial weights that follow `model.init_std`: of the plain model, the engine's and Transformers'."""

from torch import Tensor, nn

RAISED = 0.08
"""Four times the default: scaling by a power of two is exact, so weights of one seed can be compared bit for bit."""

_OF_THEIR_OWN = (
    *("norm.weight", ".bias", ".gates.proj.weight"),
    *(".w_block", ".w_place", ".w_score", ".w_square", ".w_in", ".b_in", ".phi_k.w_out", ".phi_v.w_out"),
)


def require_raised(default: nn.Module, raised: nn.Module) -> None:
    """Require of two models drawn from one seed that every weight of `raised` is four times that of `default`, except
    those whose scale does not depend on the setting, which are equal."""
    plain, large = (dict(model.named_parameters()) for model in (default, raised))
    assert plain.keys() == large.keys()
    for name, weight in plain.items():
        same = name.endswith(_OF_THEIR_OWN)
        assert _equal(large[name], weight if same else 4 * weight), name


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) & a.isfinite()).all())
