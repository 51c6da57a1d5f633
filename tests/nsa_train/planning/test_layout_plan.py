"""Layouts keep the rules and the global batch; the plan ranks what fits and says why the rest does not."""

from dataclasses import replace
from pathlib import Path

import pytest

from nsa_train.config import load
from nsa_train.config.rules import broken_parallel_rules
from nsa_train.planning.collective_bytes import (
    CollectiveGroup,
    CollectiveTotal,
    CollectiveUse,
    StepCounts,
    weight_shards,
)
from nsa_train.planning.hardware import RANKS_PER_NODE, parse_target
from nsa_train.planning.layout_plan import (
    _CALL_S,
    _LINK_SHARE,
    ImpossibleSplit,
    ParallelLayout,
    _branch_shares,
    _link_traffic,
    layouts,
    plan_layouts,
)
from nsa_train.planning.model_figures import ParameterShapes, model_figures

CONFIGS = Path(__file__).parents[3] / "configs"


def config(*changes, name="base_7b_128k"):
    return load(CONFIGS / f"{name}.yaml", overrides=list(changes))


def test_layouts_keep_the_rules_and_the_global_batch():
    run = config("train.batch_size=16", "train.accumulate_grad_batches=4")
    splits = list(layouts(run, 128, RANKS_PER_NODE))
    possible = [each for each in splits if isinstance(each, ParallelLayout)]
    assert {each.tp for each in possible} == {1, 2, 4}  # four groups
    assert {each.data for each in possible} == {"fsdp", "hsdp"}
    for each in possible:
        divided = each.applied(run)
        assert list(broken_parallel_rules(divided, 128, RANKS_PER_NODE)) == []
        assert divided.train.batch_size * divided.train.accumulate_grad_batches == 64
        assert load(CONFIGS / "base_7b_128k.yaml", overrides=each.overrides()).parallel == divided.parallel
    reasons = {(each.tp, each.cp): each.reason for each in splits if isinstance(each, ImpossibleSplit)}
    assert "model.n_kv_groups" in reasons[8, 1]
    assert "global batch of 64 rows" in reasons[1, 1]


def test_the_best_layout_fits_and_a_smaller_gpu_needs_a_longer_split():
    run = config("train.batch_size=16", "train.accumulate_grad_batches=4")
    large, small = (plan_layouts(run, parse_target(gpus), 32768) for gpus in ("h200:64", "a100-40gb:64"))
    for plan in (large, small):
        speeds = [each.tokens_per_s for each in plan.ranked]
        assert speeds == sorted(speeds, reverse=True)
        assert all(each.memory.total <= each.memory.available for each in plan.ranked)
    smallest = min(each.layout.tp * each.layout.cp for each in small.ranked)
    assert smallest > min(each.layout.tp * each.layout.cp for each in large.ranked)
    assert small.too_large
    assert all(each.memory.total > 0.9 * each.memory.available for each in small.too_large)


def test_waiting_communication_counts_and_hidden_communication_does_not():
    plan = plan_layouts(config("train.batch_size=64"), parse_target("h100-80gb:64"), 32768)
    option = next(each for each in plan.ranked if each.layout.cp > 1)
    waits = sum(each.seconds for each in option.traffic if each.use.purpose in ("halo", "gather keys"))
    assert 0 < waits < option.exposed_s
    assert option.step_s == option.compute_s + option.exposed_s


def test_a_group_inside_a_node_has_the_nodes_links_and_one_across_them_the_network():
    target, total = parse_target("h100-80gb:64"), CollectiveTotal(0, 8 * 10**9)
    inside, across, replicas = (
        _link_traffic(CollectiveUse("x", CollectiveGroup("all_gather", 8, stride), total), target)
        for stride in (1, 2, 8)
    )
    assert inside.in_node
    assert not across.in_node
    assert inside.received_bytes == 7e9
    assert inside.seconds == pytest.approx(7 / (450 * _LINK_SHARE))
    assert across.seconds == pytest.approx(7 / (4 * 50 * _LINK_SHARE))  # four network cards of a node
    assert replicas.seconds == pytest.approx(7 / (50 * _LINK_SHARE))
    called = _link_traffic(CollectiveUse("x", CollectiveGroup("all_reduce", 2, 1), CollectiveTotal(10, 0)), target)
    assert called.seconds > 10 * _CALL_S


def test_larger_nodes_and_other_links_are_used():
    """An NVL72 of which 64 GPUs are used, or all: then groups of 16 ranks cross its border, with 8 of them on it."""
    total, b200 = CollectiveTotal(0, 16 * 10**9), parse_target("b200:288")
    use = CollectiveUse("x", CollectiveGroup("all_gather", 16, 1), total)
    small, half, whole = (_link_traffic(use, replace(b200, ranks_per_node=n)) for n in (8, 64, 72))
    assert [small.in_node, half.in_node, whole.in_node] == [False, True, False]
    assert half.seconds == pytest.approx(15 / (900 * _LINK_SHARE))
    assert small.seconds == whole.seconds == pytest.approx(15 / (8 * 50 * _LINK_SHARE))
    fast = replace(b200, device=replace(b200.device, network_gb_s=100))
    assert _link_traffic(use, fast).seconds == pytest.approx(small.seconds / 2)
    assert _link_traffic(use, parse_target("b200:16")).in_node is False
    six = CollectiveUse("x", CollectiveGroup("all_gather", 6, 1), total)
    assert _link_traffic(six, parse_target("b200:6")).in_node
    run = config("train.batch_size=64")
    plan = plan_layouts(run, replace(parse_target("b200:64"), ranks_per_node=64), 32768)
    assert all(each.in_node for option in plan.ranked for each in option.traffic)


def test_a_parameter_with_fewer_rows_than_shards_is_padded():
    shapes = ParameterShapes(
        (("blocks.0.attention.phi_k.w_in", (4, 100)), ("blocks.0.attention.w_out.weight", (64, 32)))
    )
    assert shapes.share(8) == 100 + 8 * 32
    assert shapes.padded(8) == 8 * 100 + 64 * 32
    assert shapes.share(1, tp=4) == 100 + 64 * 8  # by group, and by input
    assert ParameterShapes((("blocks.0.attention_norm.weight", (64,)),)).share(8, tp=4) == 8


@pytest.mark.parametrize("name", ["base_7b_128k", "base_7b_1m"])
@pytest.mark.parametrize("ranks", [128, 1024])
def test_fsdp_gathers_hardly_more_than_the_weights_that_are_needed(name, ranks):
    model = model_figures(config(name=name), 32768)
    assert model.share(1) == model.parameters.total
    assert model.padding(1) == 1.0
    assert model.padding(ranks) <= 1.05
    assert model.padding(ranks) == pytest.approx(ranks * model.share(ranks) / model.parameters.total)


def test_context_parallel_ranks_share_weights_too():
    run = ParallelLayout("hsdp", 2, 2, 4, 1, 8, 1, "full").applied(config())
    assert weight_shards(run.parallel, 128, 8) == 8
    assert weight_shards(run.parallel.model_copy(update={"data": "fsdp"}), 128, 8) == 64
    assert weight_shards(run.parallel.model_copy(update={"data": "ddp"}), 128, 8) == 1


def test_at_a_million_tokens_the_compressed_branch_reads_forty_times_the_rest():
    shares = {each.branch: each for each in _branch_shares(config("train.seq_len=1000000", "nsa.d=16"))}
    rest = shares["selected"].reads_of_last + shares["sliding"].reads_of_last
    assert shares["compressed"].reads_of_last == pytest.approx(62_500, abs=2)
    assert shares["compressed"].reads_of_last / rest == pytest.approx(40, abs=2)
    assert shares["compressed"].flops > shares["compressed"].reads / shares["selected"].reads * shares["selected"].flops


def test_merged_layers_read_blocks_before_the_window_and_attend_to_no_compressed_keys():
    whole = config("train.seq_len=8192", "model.attention=merged", "nsa.selector_loss=1.0")
    shares = {each.branch: each for each in _branch_shares(whole)}
    g, model = whole.nsa.geometry, whole.model
    assert shares["compressed"].reads_of_last == g.n_compressed(8192 - g.w)
    assert shares["selected"].reads_of_last == g.n_selected_tokens(8192 - g.w)
    assert shares["sliding"].reads_of_last == g.w
    assert shares["compressed"].flops == pytest.approx(2 * model.n_heads * model.d_k * shares["compressed"].reads)


def test_counts_are_extended_along_a_line():
    group = CollectiveGroup("all_gather", 8, 1)
    two, three = (StepCounts(n, 1, 10 + n, 100 + 5 * n, 7.0 * n, {group: CollectiveTotal(n, 64 * n)}) for n in (2, 3))
    extended = two.extended(three, 10)
    assert extended == StepCounts(10, 1, 20, 150, 70, {group: CollectiveTotal(10, 640)}, extended_from=3)
    assert StepCounts.from_json(extended.as_json()) == extended
