"""Rules between the settings of a section, as pure functions of values; the loader adds where each value came from."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

from pydantic_core import PydanticCustomError

from nsa.core.attention_config import OPTIONS, SETTING_NAMES, AttentionConfig
from nsa.core.layer_pattern import broken_merged_rules, broken_pattern_rules
from nsa.errors import BrokenRule, ConfigError
from nsa.option_fields import OptionNames, from_options
from nsa_train.storage import StorageAddress

_T = TypeVar("_T")

BROKEN_RULES = "broken_rules"


def enforce(section: _T, broken: Iterable[BrokenRule]) -> _T:
    """Return the section, or raise with every broken rule at once."""
    if broken_rules := tuple(broken):
        text = "\n".join(rule.message for rule in broken_rules)
        raise PydanticCustomError(BROKEN_RULES, "{text}", {"text": text, "broken": broken_rules})
    return section


_NAMES = OptionNames(
    {
        **SETTING_NAMES,
        **{name: f"model.{name}" for name in ("rope_layers", "window", "n_layers")},
        "layers": "model.attention",
    }
)
"""How messages about the attention and the layers spell its options: as settings."""


def attention_of(*sections: Any) -> AttentionConfig:
    """The attention that these sections (`model`, `nsa`) describe, with the defaults of a missing one. Not checked."""
    values = {each.name: each.usual for each in OPTIONS if not each.per_layer}
    for section in sections:
        for each in OPTIONS:
            key = each.setting.rpartition(".")[2]
            if each.setting.startswith(f"{section.NAME}.") and not each.per_layer:
                values[each.name] = getattr(section, key)
    if values["rope_scaling"] is not None:
        values["rope_scaling"] = values["rope_scaling"].as_mapping
    return from_options(AttentionConfig, values)


def check_section(section: Any) -> Iterator[BrokenRule]:
    """Rules of the attention between settings of one section."""
    for rule in attention_of(section).broken_rules(_NAMES):
        if all(key.startswith(f"{section.NAME}.") for key in rule.keys):
            yield rule


def check_layers(
    attention: Sequence[str], rope_layers: Sequence[str], window: int | None, n_layers: int
) -> Iterator[BrokenRule]:
    return broken_pattern_rules(attention, rope_layers, window, n_layers, _NAMES)


def check_run(attention: AttentionConfig, layers: Sequence[str]) -> Iterator[BrokenRule]:
    """Rules between settings of `model` and `nsa`."""
    yield from attention.broken_rules(_NAMES)
    yield from broken_merged_rules(layers, attention, _NAMES)


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
