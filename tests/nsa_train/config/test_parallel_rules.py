"""Rules between settings and ranks: each broken one names its settings, their values and a value that works."""

import re
from typing import Any

import pytest

from nsa_train.config.rules import broken_parallel_rules, context_pieces, hsdp_shard_ranks
from nsa_train.config.schema import ParallelConfig, RunConfig

SMALL: dict[str, dict[str, Any]] = {
    "model": dict(n_heads=4, n_kv_groups=2),
    "nsa": dict(l=32, w=64),
    "train": dict(seq_len=512, batch_size=4),
    "parallel": {},
}


def config(**changes: Any) -> RunConfig:
    """`section__name=value` changes a setting."""
    values = {section: dict(settings) for section, settings in SMALL.items()}
    for key, value in changes.items():
        section, name = key.split("__")
        values[section][name] = value
    return RunConfig.model_validate(values)


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (1, {}),
        (4, {}),
        (8, {"parallel__tp": 2, "parallel__data": "fsdp"}),
        (8, {"parallel__cp": 2, "parallel__tp": 2, "parallel__data": "fsdp"}),
        (16, {"parallel__cp": 4, "train__seq_len": 504, "parallel__data": "hsdp"}),
        (4, {"parallel__cp": 4, "parallel__cp_split": "contiguous", "nsa__w": 129}),
        (4, {"parallel__cp": 4, "model__window": 512}),  # no layer has it
    ],
)
def test_settings_that_the_ranks_can_run(world: int, changes: dict[str, Any]) -> None:
    assert list(broken_parallel_rules(config(**changes), world, local_world=min(world, 8))) == []


@pytest.mark.parametrize(
    ("world", "changes", "keys", "fix"),
    [
        (3, {}, ("train.batch_size",), "train.batch_size=6"),
        (8, {"parallel__tp": 2}, ("parallel.tp", "parallel.data"), "parallel.data=fsdp"),
        (8, {"parallel__tp": 4, "parallel__data": "fsdp"}, ("parallel.tp", "model.n_kv_groups"), "parallel.tp=2"),
        (6, {"parallel__cp": 4}, ("parallel.tp", "parallel.cp"), "a multiple of 4 ranks"),
        (6, {"parallel__tp": 2, "parallel__data": "fsdp"}, ("train.batch_size",), "train.batch_size=6"),
        (2, {"parallel__cp": 2, "train__seq_len": 510}, ("train.seq_len",), "train.seq_len=512"),
        (4, {"parallel__cp": 4, "nsa__w": 128}, ("train.seq_len", "parallel.cp"), "train.seq_len=1024"),
        (
            4,
            {"parallel__cp": 4, "model__attention": "window,nsa", "model__window": 128},
            ("train.seq_len", "model.window"),
            "train.seq_len=1024",
        ),
        (
            2,
            {"parallel__tp": 2, "parallel__data": "fsdp", "model__qk_norm": True, "model__qk_norm_per": "layer"},
            ("parallel.tp", "model.qk_norm_per"),
            "parallel.tp=1",
        ),
        (
            8,
            {"parallel__tp": 2, "parallel__data": "hsdp", "parallel__shard_ranks": 3},
            ("parallel.shard_ranks",),
            "parallel.shard_ranks=1",
        ),
        (
            2,
            {"parallel__data": "fsdp", "train__replica_check_every": 5},
            ("train.replica_check_every",),
            "train.replica_check_every=0",
        ),
    ],
)
def test_a_broken_rule_names_its_settings_and_a_fix(
    world: int, changes: dict[str, Any], keys: tuple[str, ...], fix: str
) -> None:
    (rule,) = broken_parallel_rules(config(**changes), world, local_world=min(world, 8))
    assert set(keys) <= set(rule.keys)
    assert fix in rule.message


def test_the_suggested_length_is_long_enough() -> None:
    settings = {"parallel__cp": 4, "nsa__w": 128}
    (rule,) = broken_parallel_rules(config(**settings), 4, 4)
    (suggested,) = re.findall(r"train\.seq_len=(\d+)", rule.message)
    assert list(broken_parallel_rules(config(**settings, train__seq_len=int(suggested)), 4, 4)) == []


def test_hsdp_shards_within_a_node_unless_told_otherwise() -> None:
    assert hsdp_shard_ranks(ParallelConfig(), 8) == 8
    assert hsdp_shard_ranks(ParallelConfig(tp=2, cp=2), 8) == 2
    assert hsdp_shard_ranks(ParallelConfig(cp=16), 8) == 1
    assert hsdp_shard_ranks(ParallelConfig(shard_ranks=4, cp=16), 8) == 4


def test_zigzag_cuts_a_row_into_two_pieces_per_rank() -> None:
    assert context_pieces(ParallelConfig()) == 1
    assert context_pieces(ParallelConfig(cp=4)) == 8
    assert context_pieces(ParallelConfig(cp=4, cp_split="contiguous")) == 4
