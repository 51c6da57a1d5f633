"""Rules between the settings of a section, as pure functions of values; the loader adds where each value came from."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from pydantic_core import PydanticCustomError

from nsa.attention_rules import (
    broken_head_rules,
    broken_merged_rules,
    broken_pattern_rules,
    broken_phi_rules,
    broken_qk_norm_rules,
    broken_rope_compressed_rules,
    broken_rope_layer_rules,
    broken_rope_scaling_rules,
    broken_rotary_rules,
    broken_selector_loss_rules,
)
from nsa.errors import BrokenRule, ConfigError
from nsa.geometry import broken_coarse_rules, broken_rules
from nsa.storage import StorageAddress

T = TypeVar("T")

BROKEN_RULES = "broken_rules"


def enforce(section: T, broken: Iterable[BrokenRule]) -> T:
    """Return the section, or raise with every broken rule at once."""
    if found := tuple(broken):
        text = "\n".join(rule.message for rule in found)
        raise PydanticCustomError(BROKEN_RULES, "{text}", {"text": text, "broken": found})
    return section


def check_model(
    n_heads: int,
    n_kv_groups: int,
    d_k: int,
    rope_scaling: Mapping[str, Any],
    rope_scale: float,
    rotary_dim: int | None,
    rope_angles: str,
    attention: Sequence[str],
    rope_layers: Sequence[str],
    n_layers: int,
) -> Iterator[BrokenRule]:
    yield from broken_head_rules(n_heads, n_kv_groups, d_k)
    yield from broken_rope_scaling_rules(rope_scaling, rope_scale)
    yield from broken_rotary_rules(rotary_dim, d_k, rope_angles)
    yield from broken_pattern_rules(attention, n_layers)
    yield from broken_rope_layer_rules(rope_layers, n_layers)


def check_run(
    qk_norm: bool, qk_norm_per: str, kv: str, attention: Sequence[str], phi: str, selector_loss: float
) -> Iterator[BrokenRule]:
    """Rules between settings of `model` and `nsa`."""
    yield from broken_qk_norm_rules(qk_norm, qk_norm_per, kv)
    yield from broken_merged_rules(attention, phi, selector_loss)


def check_nsa(
    sizes: Mapping[str, int],
    phi: str,
    phi_pos_emb: bool,
    rope_compressed: str,
    kv: str,
    selector_loss: float,
    selector_loss_share: float,
    coarse_block: int,
    n_coarse: int,
) -> Iterator[BrokenRule]:
    """`sizes`: l, d, l_sel, n_sel and w, which need not make a `Geometry`."""
    yield from broken_rules(**sizes)
    yield from broken_coarse_rules(coarse_block, n_coarse, *(sizes[name] for name in ("l", "d", "l_sel", "n_sel")))
    yield from broken_phi_rules(phi, phi_pos_emb)
    yield from broken_rope_compressed_rules(phi, rope_compressed)
    yield from broken_selector_loss_rules(selector_loss, selector_loss_share, kv, phi)


def check_train(steps: int, warmup_steps: int, save_every: int, keep_every: int) -> Iterator[BrokenRule]:
    if keep_every and save_every and keep_every % save_every:
        fix = save_every * max(1, keep_every // save_every)
        yield BrokenRule(
            ("train.keep_every", "train.save_every"),
            f"train.keep_every ({keep_every}) must be a multiple of train.save_every ({save_every}): only a checkpoint "
            f"that is written can be kept. Set e.g. train.keep_every={fix}.",
        )
    if warmup_steps > steps:
        yield BrokenRule(
            ("train.warmup_steps", "train.steps"),
            f"train.warmup_steps ({warmup_steps}) must not exceed train.steps ({steps}): the learning rate would never "
            f"reach train.lr. Set e.g. train.warmup_steps={steps // 20}.",
        )


def check_checkpoint_store(url: str | None) -> Iterator[BrokenRule]:
    bucket, _, path = (url or "").removeprefix("s3://").partition("/")
    if url is not None and not (url.startswith("s3://") and bucket and path):
        yield BrokenRule(
            ("train.checkpoint_store",),
            f"train.checkpoint_store ({url}) must name a place in an object store: a folder of checkpoints is that of "
            f"train.out_dir. Set it to s3://BUCKET/PATH, or to null.",
        )
    elif url is not None:
        try:
            StorageAddress.parse(url)
        except ConfigError as error:
            fix = "Set it to s3://BUCKET/PATH, or to null."
            yield BrokenRule(("train.checkpoint_store",), f"train.checkpoint_store: {error} {fix}")


def check_data(dataset: str, path: str | None) -> Iterator[BrokenRule]:
    if dataset in ("local", "prepared") and path is None:
        yield BrokenRule(
            ("data.dataset", "data.path"),
            f"data.dataset ({dataset}) needs data.path (null): there is no default location for your own data. "
            f"Set data.path to the folder.",
        )
