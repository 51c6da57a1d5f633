"""What must hold between settings. A rule looks at values only; where they came from is the loader's business."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from pydantic_core import PydanticCustomError

from nsa import geometry
from nsa.geometry import broken_rope_rule

if TYPE_CHECKING:
    from nsa.config.schema import DataConfig, ModelConfig, NSAConfig, TrainConfig

T = TypeVar("T")

BROKEN_RULES = "broken_rules"


class BrokenRule(NamedTuple):
    """A rule that does not hold, with the dotted keys it speaks about."""

    keys: tuple[str, ...]
    message: str


def enforce(section: T, broken: Iterable[BrokenRule]) -> T:
    """Return the section, or raise with every broken rule at once."""
    if found := tuple(broken):
        text = "\n".join(rule.message for rule in found)
        raise PydanticCustomError(BROKEN_RULES, "{text}", {"text": text, "broken": found})
    return section


def of_model(model: ModelConfig) -> Iterator[BrokenRule]:
    if model.n_heads % model.n_kv_groups:
        yield BrokenRule(
            ("model.n_heads", "model.n_kv_groups"),
            f"model.n_kv_groups ({model.n_kv_groups}) must divide model.n_heads ({model.n_heads}): each group serves "
            f"as many heads as another. Set e.g. model.n_kv_groups={_divisor_up_to(model.n_kv_groups, model.n_heads)}.",
        )
    if model.d_k % 2:
        yield BrokenRule(
            ("model.d_k",),
            f"model.d_k ({model.d_k}) must be even: RoPE rotates pairs. Set e.g. model.d_k={model.d_k + 1}.",
        )


def of_nsa(nsa: NSAConfig) -> Iterator[BrokenRule]:
    for keys, message in geometry.broken_rules(nsa.l, nsa.d, nsa.l_sel, nsa.n_sel, nsa.w):
        yield BrokenRule(keys, message)
    if nsa.phi_pos_emb and nsa.phi == "avg":
        yield BrokenRule(
            ("nsa.phi_pos_emb", "nsa.phi"),
            "nsa.phi_pos_emb (true) needs a learned nsa.phi (avg): under an average a position only adds a constant. "
            "Set nsa.phi=linear or mlp, or nsa.phi_pos_emb=false.",
        )
    if broken := broken_rope_rule(nsa.phi, nsa.rope_compressed):
        yield BrokenRule(("nsa.rope_compressed", "nsa.phi"), broken)


def of_train(train: TrainConfig) -> Iterator[BrokenRule]:
    if train.keep_every and train.save_every and train.keep_every % train.save_every:
        fix = train.save_every * max(1, train.keep_every // train.save_every)
        yield BrokenRule(
            ("train.keep_every", "train.save_every"),
            f"train.keep_every ({train.keep_every}) must be a multiple of train.save_every ({train.save_every}): only "
            f"a checkpoint that is written can be kept. Set e.g. train.keep_every={fix}.",
        )
    if train.warmup_steps > train.steps:
        yield BrokenRule(
            ("train.warmup_steps", "train.steps"),
            f"train.warmup_steps ({train.warmup_steps}) must not exceed train.steps ({train.steps}): the learning rate "
            f"would never reach train.lr. Set e.g. train.warmup_steps={train.steps // 20}.",
        )


def of_data(data: DataConfig) -> Iterator[BrokenRule]:
    if data.dataset in ("local", "prepared") and data.path is None:
        yield BrokenRule(
            ("data.dataset", "data.path"),
            f"data.dataset ({data.dataset}) needs data.path (null): there is no default place for your own data. "
            f"Set data.path to the folder.",
        )


_LARGEST_SUGGESTION = 1024


def _divisor_up_to(limit: int, number: int) -> int:
    """The largest divisor that is worth suggesting; found at once, however large the numbers are."""
    return next(divisor for divisor in range(min(limit, _LARGEST_SUGGESTION), 0, -1) if number % divisor == 0)
