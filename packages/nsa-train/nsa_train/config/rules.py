"""Rules between settings, and between a run's settings and its ranks; the loader adds where each value came from."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic_core import PydanticCustomError

from nsa.core.attention_config import OPTIONS, SETTING_NAMES, AttentionConfig
from nsa.core.layer_pattern import broken_merged_rules, broken_pattern_rules
from nsa.errors import BrokenRule, ConfigError
from nsa.option_fields import OptionNames, from_options
from nsa_train.storage import StorageAddress

if TYPE_CHECKING:
    from nsa_train.config.schema import ParallelConfig, RunConfig

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
"""Options of the attention and the layers, spelled as settings in messages."""


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


def check_data(dataset: str, path: str | None, mixture: Mapping[str, float] | None) -> Iterator[BrokenRule]:
    if mixture is not None and (dataset != "prepared" or path is not None or not mixture):
        yield BrokenRule(
            ("data.mixture", "data.dataset", "data.path"),
            f"data.mixture is set, data.dataset is {dataset} and data.path is {path or 'null'}: a mixture is of "
            f"prepared sets, in place of data.path. Set data.dataset=prepared data.path=null, or data.mixture=null.",
        )
    elif dataset in ("local", "prepared") and path is None and mixture is None:
        yield BrokenRule(
            ("data.dataset", "data.path"),
            f"data.dataset ({dataset}) needs data.path (null): there is no default location for your own data. "
            f"Set data.path to the folder.",
        )


def broken_parallel_rules(config: "RunConfig", world: int, local_world: int) -> Iterator[BrokenRule]:
    """The rules that do not hold with this number of ranks, of which `local_world` are on one node."""
    yield from _broken_tp_rules(config)
    yield from _broken_cp_rules(config)
    yield from _broken_world_rules(config, world, local_world)
    train, data = config.train, config.parallel.data
    if train.replica_check_every and data == "fsdp" and world > 1:
        yield BrokenRule(
            ("train.replica_check_every", "parallel.data"),
            f"train.replica_check_every is {train.replica_check_every} and parallel.data is fsdp: every rank holds "
            f"a different shard of the weights, so there are no replicas to compare. Set train.replica_check_every=0.",
        )


def hsdp_shard_ranks(parallel: "ParallelConfig", local_world: int) -> int:
    """Data-parallel ranks in a group that shares one copy of the weights."""
    return parallel.shard_ranks or max(1, local_world // parallel.ranks_per_row)


def context_pieces(parallel: "ParallelConfig") -> int:
    """Pieces of equal length that a row is cut into."""
    return parallel.cp * (2 if parallel.cp_split == "zigzag" and parallel.cp > 1 else 1)


def _broken_tp_rules(config: "RunConfig") -> Iterator[BrokenRule]:
    tp, groups = config.parallel.tp, config.model.n_kv_groups
    if groups % tp:
        yield BrokenRule(
            ("parallel.tp", "model.n_kv_groups"),
            f"parallel.tp ({tp}) must divide model.n_kv_groups ({groups}): a rank computes whole groups of heads. Set "
            f"e.g. parallel.tp={math.gcd(tp, groups)}.",
        )
    if tp > 1 and config.model.qk_norm_per == "layer":
        yield BrokenRule(
            ("parallel.tp", "model.qk_norm_per"),
            f"parallel.tp is {tp} and model.qk_norm_per is layer: the norm is over all heads, and a rank has some "
            f"of them. Set parallel.tp=1; parallel.cp and fsdp divide such a model too.",
        )
    if tp > 1 and config.parallel.data == "ddp":
        yield BrokenRule(
            ("parallel.tp", "parallel.data"),
            f"parallel.tp is {tp} and parallel.data is ddp: ddp cannot replicate weights that tensor parallelism "
            f"shards. Set parallel.data=fsdp or hsdp.",
        )


def _broken_cp_rules(config: "RunConfig") -> Iterator[BrokenRule]:
    parallel, seq_len = config.parallel, config.train.seq_len
    if parallel.ranks_per_row == 1:
        return
    pieces = context_pieces(parallel)
    unit = math.lcm(pieces, parallel.ranks_per_row)
    if seq_len % unit:
        yield BrokenRule(
            ("train.seq_len", "parallel.cp", "parallel.tp", "parallel.cp_split"),
            f"train.seq_len ({seq_len}) must be a multiple of {unit}: parallel.cp={parallel.cp} ({parallel.cp_split}) "
            f"and parallel.tp={parallel.tp} cut every row into pieces of equal length. Set e.g. "
            f"train.seq_len={-(-seq_len // unit) * unit}.",
        )
    windows = [config.window] if "window" in config.model.attention else []
    reach = max(config.nsa.w, config.nsa.l, *windows) - 1
    if parallel.cp > 1 and seq_len // pieces < reach:
        yield BrokenRule(
            ("train.seq_len", "parallel.cp", "nsa.w", "nsa.l", "model.window"),
            f"train.seq_len ({seq_len}) gives {pieces} pieces of {seq_len // pieces} tokens with parallel.cp="
            f"{parallel.cp} ({parallel.cp_split}): a piece needs at least {reach} tokens, the longest "
            f"window (nsa.w, model.window) or block (nsa.l) less one, because a rank reads earlier keys from one "
            f"neighbour only. Lower parallel.cp, or set "
            f"train.seq_len={-(-reach // 2) * 2 * pieces} or more.",
        )


def _broken_world_rules(config: "RunConfig", world: int, local_world: int) -> Iterator[BrokenRule]:
    train, parallel = config.train, config.parallel
    per_row = parallel.ranks_per_row
    if world % per_row:
        yield BrokenRule(
            ("parallel.tp", "parallel.cp"),
            f"parallel.tp ({parallel.tp}) times parallel.cp ({parallel.cp}) must divide the number of ranks ({world}): "
            f"that many ranks work on the same rows. Start a multiple of {per_row} ranks.",
        )
        return
    data_ranks = world // per_row
    among = f"ranks ({world})"
    if per_row > 1:
        among = f"data-parallel ranks ({data_ranks}: {world} ranks, {per_row} to a row)"
    if train.batch_size % data_ranks:
        yield BrokenRule(
            ("train.batch_size",),
            f"train.batch_size ({train.batch_size}) must be a multiple of the number of {among}: every one gets the "
            f"same number of rows. Set e.g. train.batch_size={-(-train.batch_size // data_ranks) * data_ranks}.",
        )
    shard_ranks = hsdp_shard_ranks(parallel, local_world)
    if parallel.data == "hsdp" and data_ranks % shard_ranks:
        yield BrokenRule(
            ("parallel.shard_ranks",),
            f"parallel.shard_ranks ({parallel.shard_ranks or f'null: {shard_ranks}'}) must divide the number of "
            f"{among}: hsdp makes groups of that size. Set e.g. "
            f"parallel.shard_ranks={math.gcd(data_ranks, shard_ranks)}.",
        )
