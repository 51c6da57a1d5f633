"""Real runs with a NaN, an infinity, a spike or a flipped bit planted in them."""

import json
import math

import pytest
import torch

from nsa_train import names
from nsa_train.record.events import EventKind, read_events
from nsa_train.record.failure_codes import FailureCode
from nsa_train.record.heartbeat_record import read_beats
from nsa_train.train.callbacks.replica_check import _odd_ones_out, fingerprint
from tests.nsa_train.train.faulty_runs import Fault, run_faulty
from tests.nsa_train.train.runs import Job

BASE = ["train.steps=12", "train.lr_schedule=constant"]
STREAK = ["train.save_every=5", "train.max_skipped=2"]
SPIKES = ["train.spike_sigma=20", "train.skip_window=8"]
FSDP, HSDP = ["parallel.data=fsdp"], ["parallel.data=hsdp", "parallel.shard_ranks=2"]
GONE, BAD_STREAK = [5, 6, 7, 8], [6, 7, 8]


def run(tmp_path_factory, **pairs):
    folder = tmp_path_factory.mktemp("faulty")
    named = []
    for name, (job, fault) in pairs.items():
        job.changes = [*BASE, *job.changes]
        job.out_dir = str(folder / name.split("__")[0])
        named.append((job, fault))
    return folder, dict(zip(pairs, run_faulty(*named), strict=True))


def weights(folder):
    return torch.load(folder / names.MODEL, weights_only=True)


def same_weights(a, b):
    mine, theirs = weights(a), weights(b)
    assert all(tensor.isfinite().all() for tensor in mine.values())
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def state(folder, step):
    return json.loads((folder / names.CHECKPOINTS / f"step{step}" / "state.json").read_text())


def skipped(folder, rank=0):
    return [
        (beat.step, beat.detail) for beat in read_beats(folder / names.heartbeat(rank)) if beat.msg == names.SKIPPED
    ]


@pytest.fixture(scope="module")
def skips(tmp_path_factory):
    return run(
        tmp_path_factory,
        without_1=(Job("", 1), Fault("left_out", [4])),
        forward_1=(Job("", 1), Fault("forward", [4])),
        gradient_1=(Job("", 1), Fault("gradient", [4])),
        spike_1=(Job("", 1, SPIKES), Fault("spike", [4])),
        calm=(Job("", 1, SPIKES), Fault()),
        without_ddp=(Job("", 2), Fault("left_out", [4])),
        loss_ddp=(Job("", 2), Fault("loss", [4], rank=1)),
        without_fsdp=(Job("", 2, FSDP), Fault("left_out", [4])),
        forward_fsdp=(Job("", 2, FSDP), Fault("forward", [4], rank=0)),
    )


@pytest.fixture(scope="module")
def skips_at_night(tmp_path_factory):
    return run(
        tmp_path_factory,
        without_1=(Job("", 1), Fault("left_out", [4])),
        loss_1=(Job("", 1), Fault("loss", [4])),
        without_ddp=(Job("", 2), Fault("left_out", [4])),
        forward_ddp=(Job("", 2), Fault("forward", [4], rank=1)),
        gradient_ddp=(Job("", 2), Fault("gradient", [4], rank=1)),
        without_fsdp=(Job("", 2, FSDP), Fault("left_out", [4])),
        loss_fsdp=(Job("", 2, FSDP), Fault("loss", [4], rank=1)),
    )


@pytest.fixture
def skipping(request, case):
    """The runs that the case is among."""
    return request.getfixturevalue("skips_at_night" if case in AT_NIGHT else "skips")


# For every change each fault once, and a run of each kind; every night faults of one kind in runs of another.
BY_DAY = ["forward_1", "gradient_1", "spike_1", "loss_ddp", "forward_fsdp"]
AT_NIGHT = ["loss_1", "forward_ddp", "gradient_ddp", "loss_fsdp"]
CASES = [*BY_DAY, *(pytest.param(case, marks=pytest.mark.nightly) for case in AT_NIGHT)]


@pytest.mark.parametrize("case", CASES)
def test_a_bad_step_leaves_the_weights_of_a_run_without_it(skipping, case):
    folder, codes = skipping
    assert set(codes[case]) == {0}
    assert same_weights(folder / case, folder / f"without_{case.split('_')[1]}")


RARE = "train.log_every=100"
LATER = dict(deferred=True)


@pytest.fixture(scope="module")
def later(tmp_path_factory):
    """As on a GPU: decided on the device, read by the host a step later."""
    return run(
        tmp_path_factory,
        without_1=(Job("", 1, [RARE]), Fault("left_out", [4], **LATER)),
        forward_1=(Job("", 1, [RARE]), Fault("forward", [4], **LATER)),
        last=(Job("", 1, [RARE]), Fault("forward", [11], **LATER)),
        without_last=(Job("", 1, [RARE]), Fault("left_out", [11], **LATER)),
    )


@pytest.fixture(scope="module")
def later_in_other_runs(tmp_path_factory):
    return run(
        tmp_path_factory,
        without_1=(Job("", 1, [RARE]), Fault("left_out", [4], **LATER)),
        gradient_1=(Job("", 1, [RARE]), Fault("gradient", [4], **LATER)),
        spike_1=(Job("", 1, [RARE, *SPIKES]), Fault("spike", [4], **LATER)),
        logged_1=(Job("", 1), Fault("forward", [4], **LATER)),
        without_ddp=(Job("", 2, [RARE]), Fault("left_out", [4], **LATER)),
        loss_ddp=(Job("", 2, [RARE]), Fault("loss", [4], rank=1, **LATER)),
        without_fsdp=(Job("", 2, [RARE, *FSDP]), Fault("left_out", [4], **LATER)),
        forward_fsdp=(Job("", 2, [RARE, *FSDP]), Fault("forward", [4], rank=0, **LATER)),
        gap=(Job("", 1, [RARE, *STREAK]), Fault("gap", [*GONE, 9], **LATER)),
        streak=(Job("", 1, [RARE, *STREAK]), Fault("forward", BAD_STREAK, **LATER)),
        resumed=(Job("", 1, [RARE, "train.save_every=4", "train.steps=8"]), Fault()),
        resumed__again=(Job("", 1, [RARE, "train.save_every=4"], resume=True), Fault("forward", [9], **LATER)),
    )


def assert_skipped_once(runs, case):
    folder, codes = runs
    assert set(codes[case]) == {0}
    assert same_weights(folder / case, folder / f"without_{case.split('_')[1]}")
    told = [skipped(folder / case, rank) for rank in range(len(codes[case]))]
    assert [step for step, _ in told[0]] == [5]
    assert all(other == told[0] for other in told)
    assert state(folder / case, 12)["spike_window"]["skipped_steps"] == 1


def test_a_step_skipped_on_the_device_leaves_the_same_weights_and_record(later):
    assert_skipped_once(later, "forward_1")


@pytest.mark.nightly
@pytest.mark.parametrize("case", ["gradient_1", "spike_1", "logged_1", "loss_ddp", "forward_fsdp"])
def test_so_does_one_of_another_cause_or_on_several_ranks(later_in_other_runs, case):
    assert_skipped_once(later_in_other_runs, case)


@pytest.mark.nightly
def test_a_streak_read_later_leaves_out_one_batch_more(later_in_other_runs):
    folder, codes = later_in_other_runs
    assert codes["streak"] == codes["gap"] == [0]
    assert same_weights(folder / "streak", folder / "gap")
    record = state(folder / "streak", 12)
    assert record["skipped_batches"] == [[5, 10]]
    assert [step for step, _ in skipped(folder / "streak")] == [7, 8, 9]


def test_the_last_step_is_read_before_the_last_save(later):
    folder, _ = later
    assert same_weights(folder / "last", folder / "without_last")
    assert [step for step, _ in skipped(folder / "last")] == [12]
    assert state(folder / "last", 12)["spike_window"]["skipped_steps"] == 1


@pytest.mark.nightly
def test_a_checkpoint_of_another_optimizer_is_resumed(later_in_other_runs):
    folder, codes = later_in_other_runs
    assert codes["resumed__again"] == [0]
    assert [step for step, _ in skipped(folder / "resumed")] == [10]


@pytest.mark.parametrize("case", CASES)
def test_it_is_skipped_on_all_ranks_and_written_down(skipping, case):
    folder, codes = skipping
    told = [skipped(folder / case, rank) for rank in range(len(codes[case]))]
    assert [step for step, _ in told[0]] == [5]
    assert all(other == told[0] for other in told)
    events = [event for event in read_events(folder / case) if event.kind == EventKind.SKIPPED_STEP]
    assert [(event.step, event.details["reason"]) for event in events] == told[0]
    progress = [beat for beat in read_beats(folder / case / names.heartbeat(0)) if beat.msg == names.PROGRESS]
    assert [beat.skipped_steps for beat in progress] == [0] * 4 + [1] * 8
    assert progress[-1].nonfinite_steps == (case != "spike_1")
    metrics = json.loads((folder / case / names.METRICS).read_text())
    assert math.isfinite(metrics["best_loss"])


def test_a_nan_does_not_stay_in_the_window(skips):
    window = state(skips[0] / "forward_fsdp", 12)["spike_window"]
    assert len(window["losses"]) == len(window["grad_norms"]) == 11
    assert all(map(math.isfinite, window["losses"] + window["grad_norms"]))
    assert (window["recent"], window["nonfinite_steps"]) == ([5], 1)


def test_calm_runs_have_nothing_to_tell(skips):
    folder, _ = skips
    assert skipped(folder / "calm") == []
    assert state(folder / "calm", 12)["skipped_batches"] == []


@pytest.fixture(scope="module")
def ways_back(tmp_path_factory):
    bad, for_ever, gap = Fault("forward", BAD_STREAK, rank=0), Fault("forward", list(range(6, 99))), Fault("gap", GONE)
    return run(
        tmp_path_factory,
        gap_1=(Job("", 1, STREAK), gap),
        streak_1=(Job("", 1, STREAK), bad),
        gap_fsdp=(Job("", 2, [*STREAK, *FSDP]), gap),
        streak_fsdp=(Job("", 2, [*STREAK, *FSDP]), bad),
        for_ever=(Job("", 1, STREAK), for_ever),
        too_early=(Job("", 1, ["train.save_every=0", *STREAK[1:]]), Fault("forward", [1, 2, 3])),
        half=(Job("", 1, [*STREAK, "train.steps=11"]), bad),
        half__on=(Job("", 1, STREAK, resume=True), bad),
    )


@pytest.fixture(scope="module")
def ways_back_at_night(tmp_path_factory):
    bad, for_ever, gap = Fault("forward", BAD_STREAK, rank=0), Fault("forward", list(range(6, 99))), Fault("gap", GONE)
    return run(
        tmp_path_factory,
        gap_1=(Job("", 1, STREAK), gap),
        fed_1=(Job("", 1, [*STREAK, "data.prefetch=true"]), bad),
        gap_ddp=(Job("", 2, STREAK), gap),
        streak_ddp=(Job("", 2, STREAK), bad),
        for_ever=(Job("", 2, STREAK), for_ever),
        no_way=(Job("", 1, [*STREAK, "train.max_rollbacks=0"]), for_ever),
    )


@pytest.fixture
def going_back(request, case):
    """The runs that the case is among."""
    return request.getfixturevalue("ways_back_at_night" if case in ("fed_1", "streak_ddp") else "ways_back")


@pytest.mark.parametrize(
    "case",
    ["streak_1", "streak_fsdp", "half", *(pytest.param(c, marks=pytest.mark.nightly) for c in ("fed_1", "streak_ddp"))],
)
def test_a_streak_is_gone_back_from_and_its_batches_left_out(going_back, case):
    folder, codes = going_back
    assert set(codes[case]) == {0}
    way = "1" if case == "half" else case.split("_")[1]
    assert same_weights(folder / case, folder / f"gap_{way}")
    record, calm = state(folder / case, 12), state(folder / f"gap_{way}", 12)
    assert record["skipped_batches"] == [[5, 9]]
    assert record["data_cursor"] == calm["data_cursor"]
    assert record["spike_window"]["losses"] == calm["spike_window"]["losses"]
    assert (record["spike_window"]["nonfinite_steps"], record["spike_window"]["origins"]) == (3, [5])


def test_the_way_back_is_told(ways_back):
    folder, _ = ways_back
    events = read_events(folder / "streak_fsdp")
    kinds = [
        event.kind
        for event in events
        if event.kind in (EventKind.SKIPPED_STEP, EventKind.ROLLBACK, EventKind.LOST_STEPS)
    ]
    assert kinds == [EventKind.SKIPPED_STEP] * 3 + [EventKind.ROLLBACK, EventKind.LOST_STEPS]
    (back,) = [event for event in events if event.kind == EventKind.ROLLBACK]
    assert (back.step, back.details["left_out_batches"]) == (9, [5, 9])
    assert "loss is nan" in back.details["reason"]
    (lost,) = [event for event in events if event.kind == EventKind.LOST_STEPS]
    assert (lost.step, lost.details["steps"]) == (5, 4)
    for rank in (0, 1):
        beats = list(read_beats(folder / "streak_fsdp" / names.heartbeat(rank)))
        assert [beat.step for beat in beats if beat.msg == names.ROLLED_BACK] == [5]
        progress = [beat for beat in beats if beat.msg == names.PROGRESS]
        assert [beat.step for beat in progress] == [*range(1, 9), *range(6, 13)]
        assert all(beat.toks_per_s > 0 for beat in progress)


def assert_given_up(folder, says: dict[str, str]) -> None:
    ends = {name: read_events(folder / name)[-1] for name in says}
    assert all(end.kind == EventKind.ERROR for end in ends.values())
    assert {end.details["failure_code"] for end in ends.values()} == {FailureCode.NONFINITE}
    assert all(text in ends[name].details["error"] for name, text in says.items())
    assert [event.kind for event in read_events(folder / "for_ever")].count(EventKind.ROLLBACK) == 1
    assert (folder / "for_ever" / names.CHECKPOINTS / "step5").is_dir()


def test_what_does_not_get_better_ends_with_exit_code_23(ways_back):
    folder, codes = ways_back
    assert (codes["for_ever"], codes["too_early"]) == ([23], [23])
    assert_given_up(folder, {"for_ever": "rolled back to step 5 before", "too_early": "no checkpoint"})


@pytest.mark.nightly  # one rank for every change
def test_so_it_does_on_two_ranks_and_where_no_way_back_is_allowed(ways_back_at_night):
    folder, codes = ways_back_at_night
    assert (codes["for_ever"], codes["no_way"]) == ([23, 23], [23])
    assert_given_up(folder, {"for_ever": "rolled back to step 5 before", "no_way": "max_rollbacks"})


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """A spike two steps after the stop, which a window begun anew would be too short to tell."""
    return run(
        tmp_path_factory,
        whole=(Job("", 1, SPIKES), Fault("spike", [7])),
        stopped=(Job("", 1, [*SPIKES, "train.steps=6"]), Fault("spike", [7])),
        stopped__on=(Job("", 1, SPIKES, resume=True), Fault("spike", [7])),
    )


def test_a_resumed_run_decides_as_if_never_stopped(resumed):
    folder, codes = resumed
    assert set(map(tuple, codes.values())) == {(0,)}
    assert skipped(folder / "stopped") == skipped(folder / "whole")
    assert [step for step, _ in skipped(folder / "whole")] == [8]
    assert same_weights(folder / "stopped", folder / "whole")
    assert state(folder / "stopped", 12)["spike_window"] == state(folder / "whole", 12)["spike_window"]


@pytest.fixture(scope="module")
def flips(tmp_path_factory):
    each = ["train.replica_check_every=1"]
    return run(
        tmp_path_factory,
        two=(Job("", 2, each), Fault("weight", [3], rank=1)),
        three=(Job("", 3, ["train.batch_size=3", *each]), Fault("weight", [3], rank=1)),
        seldom=(Job("", 2, ["train.replica_check_every=12", "train.steps=5"]), Fault("weight", [3], rank=1)),
    )


@pytest.mark.parametrize(("case", "ranks"), [("two", "0, 1"), ("three", "1")])
def test_a_flipped_bit_on_one_replica_ends_the_run_and_names_the_rank(flips, case, ranks):
    assert_named(*flips, case, ranks)


@pytest.mark.nightly  # four ranks
def test_it_does_where_a_replica_is_divided_among_ranks(tmp_path_factory):
    hsdp = Job("", 4, [*HSDP, "train.replica_check_every=1"])
    assert_named(*run(tmp_path_factory, hsdp=(hsdp, Fault("weight", [3], rank=2))), "hsdp", "0, 2")


def assert_named(folder, codes, case, ranks):
    assert set(codes[case]) == {16}
    end = read_events(folder / case)[-1]
    assert end.kind == EventKind.ERROR
    assert f"step 4: the weights of rank {ranks} differ" in end.details["error"]


def test_replicas_are_not_compared_in_between(flips):
    assert flips[1]["seldom"] == [0, 0]


@pytest.mark.parametrize(
    ("answers", "odd"),
    [
        ([(0, 7)], []),
        ([(0, 7), (0, 7), (0, 7)], []),
        ([(0, 7), (0, 8), (0, 7)], [1]),
        ([(0, 7), (0, 8)], [0, 1]),
        ([(0, 7), (1, 8), (0, 7), (1, 9), (1, 8)], [3]),
        ([(0, 1), (1, 2), (2, 3)], []),
    ],
)
def test_odd_ones_out(answers, odd):
    assert _odd_ones_out(answers) == odd


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_flipped_bit_changes_the_fingerprint(dtype):
    tensors = [torch.randn(3, 5).to(dtype), torch.randn(4).to(dtype)]
    before = fingerprint(tensors)
    whole = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64}[dtype]
    for tensor in tensors:
        for bit in range(8 * tensor.element_size() - 1):
            tensor.view(whole).view(-1)[2] ^= 1 << bit
            assert fingerprint(tensors) != before
            tensor.view(whole).view(-1)[2] ^= 1 << bit
    assert fingerprint(tensors) == before
