"""Data mixtures: proportions within one row at every prefix, rows of the sets themselves, ends, identity, refusals."""

from collections import deque
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.errors import ConfigError
from nsa_train import names
from nsa_train.config import load
from nsa_train.data.rows.batch import EndOfData
from nsa_train.data.rows.mixture import MixtureOrder, whole_weights
from nsa_train.data.rows.row_stream import IndexedRowStream
from nsa_train.data.rows.specs import MixedData, PreparedData
from nsa_train.record.heartbeat_record import read_beats
from nsa_train.train import datasets
from tests.nsa_train.data.shard_sets import documents, write_set
from tests.nsa_train.train.runs import Job, run_all

WEIGHTS = {"web": 0.6, "code": 0.3, "math": 0.1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sets")
    for seed, name in enumerate(WEIGHTS):
        write_set(path / name, documents(40 + 40 * seed, seed))
    write_set(path / "other", documents(10), tokenizer="other")
    return path


def mixed(folder: Path, weights: dict[str, float] = WEIGHTS, **options) -> MixedData:
    sets = tuple(PreparedData(str(folder / name), 64, seed=3, with_provenance=True, **options) for name in weights)
    return MixedData(sets, whole_weights(weights), 64)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_every_prefix_has_the_proportions_to_within_one_row(weights: list[int]) -> None:
    whole = whole_weights({str(place): weight for place, weight in enumerate(weights)})
    order, period = MixtureOrder(whole), sum(whole)
    counts = np.array([order.counts(rows) for rows in range(2 * period + 1)])
    exact = np.arange(2 * period + 1)[:, None] * np.array(whole) / period
    assert np.abs(counts - exact).max() < 1
    chosen, places = order.places(np.arange(2 * period))
    assert all(np.array_equal(places[chosen == each], np.arange(2 * whole[each])) for each in range(len(whole)))


def test_weights_are_whole_numbers_as_small_as_they_can_be() -> None:
    assert whole_weights({"a": 0.7, "b": 0.2, "c": 0.1}) == (7, 2, 1)
    assert whole_weights({"a": 1e-3, "b": 2.5e-3}) == (2, 5)
    assert whole_weights({"a": 30.0}) == (1,)
    with pytest.raises(ConfigError, match="fewer digits"):
        whole_weights({"a": 0.123456, "b": 0.5})


def test_rows_are_those_of_each_set_in_its_own_order(folder: Path) -> None:
    data = mixed(folder)
    whole = IndexedRowStream(data.sets[0].make_rows())
    alone = [whole, *(IndexedRowStream(each.make_rows()) for each in data.sets[1:])]
    stream, chosen = data.open(), MixtureOrder(data.weights).places(np.arange(40))[0]
    for start in range(0, 40, 8):
        batch = stream.next_batch(8)
        assert batch.row_ids.tolist() == list(range(start, start + 8))
        for row, number in enumerate(chosen[start : start + 8]):
            expected = alone[number].next_batch(1)
            assert np.array_equal(batch.tokens[row], expected.tokens[0])
            assert np.array_equal(batch.cu_doc_lens[row], expected.cu_doc_lens[0])
            assert batch.provenance[row] == expected.provenance[0]
            mask = np.ones(64, bool) if batch.loss_mask is None else batch.loss_mask[row]
            assert np.array_equal(mask, np.ones(64, bool) if expected.loss_mask is None else expected.loss_mask[0])


def test_a_set_without_more_rows_ends_the_mixture_and_is_named(folder: Path) -> None:
    stream = mixed(folder, max_epochs=1).open()
    with pytest.raises(EndOfData, match="web"):
        deque(iter(lambda: stream.next_batch(8), None), maxlen=1)


def test_a_cursor_is_refused_with_other_weights_or_sets(folder: Path) -> None:
    state = mixed(folder).open().state_dict()
    mixed(folder).open().load_state_dict(state)
    for other in ({**WEIGHTS, "web": 0.7}, {"web": 0.6, "math": 0.3, "code": 0.1}, {"web": 0.6, "code": 0.3}):
        with pytest.raises(ConfigError, match="sets"):
            mixed(folder, other).open().load_state_dict(state)


def test_settings_give_the_sets_and_their_split(folder: Path) -> None:
    sets = ", ".join(f"{folder / name}: {weight}" for name, weight in WEIGHTS.items())
    words = ["data.dataset=prepared", "data.path=null", f"data.mixture={{{sets}}}", "train.seq_len=64"]
    config = load("configs/train_50k.yaml", overrides=words)
    data = datasets.training_rows(config, 257)
    assert isinstance(data, MixedData)
    assert (data.weights, [Path(each.url).name for each in data.sets]) == ((6, 3, 1), list(WEIGHTS))
    assert {each.split for each in datasets.held_out_rows(config, 257).sets} == {"validation"}
    assert datasets.vocabulary(config) == 257
    assert datasets.remote_address(config) is None
    with pytest.raises(ConfigError, match="different tokenizers"):
        datasets.vocabulary(
            load("configs/train_50k.yaml", overrides=[*words[:2], f"data.mixture={{{sets}, {folder / 'other'}: 1}}"])
        )
    for wrong in (["data.path=x"], ["data.dataset=local"], ["data.mixture={}"], ["data.mixture={a: -1}"]):
        with pytest.raises(ConfigError, match=r"data\.mixture"):
            load("configs/train_50k.yaml", overrides=[*words, *wrong])


@pytest.mark.nightly  # four training runs
def test_a_training_run_reads_the_same_rows_with_other_ranks(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("olmo_core", reason="in the train extra")
    sets = ", ".join(f"{folder / name}: {weight}" for name, weight in WEIGHTS.items())
    words = ["data.dataset=prepared", f"data.mixture={{{sets}}}", "train.save_every=2", "train.lr_schedule=constant"]
    of_steps = {steps: [*words, f"train.steps={steps}"] for steps in (2, 4, 6)}
    stopped = str(tmp_path / "stopped")
    jobs = [
        Job(str(tmp_path / "whole"), 1, of_steps[6]),
        Job(stopped, 1, of_steps[2]),
        Job(stopped, 4, of_steps[4], resume=True),
        Job(stopped, 2, of_steps[6], resume=True),
        Job(stopped, 1, [*of_steps[6], f"data.mixture={{{sets.replace('0.6', '0.5')}}}"], resume=True),
    ]
    assert run_all(*jobs) == [[0], [0], [0] * 4, [0] * 2, [20]]
    losses = [
        {beat.step: beat.loss for beat in read_beats(tmp_path / run / names.heartbeat(0)) if beat.loss is not None}
        for run in ("whole", "stopped")
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert len(losses[0]) == 6
