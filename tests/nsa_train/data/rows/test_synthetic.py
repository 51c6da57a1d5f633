import numpy as np
import pytest

from nsa.errors import ConfigError
from nsa_train.data.rows.row_stream import IndexedRowStream
from nsa_train.data.rows.synthetic import SyntheticRows

TASKS = ["uniform", "copy", "needle"]


def _rows(task: str, seq_len: int = 40, vocab_size: int = 50, seed: int = 3) -> SyntheticRows:
    return SyntheticRows(task, vocab_size=vocab_size, seq_len=seq_len, seed=seed)  # type: ignore[arg-type]


@pytest.mark.parametrize("task", TASKS)
def test_a_row_depends_on_seed_and_index_alone(task: str) -> None:
    whole = _rows(task).rows(np.arange(20)).tokens
    assert np.array_equal(_rows(task).rows(np.asarray([13, 2])).tokens, whole[[13, 2]])
    assert not np.array_equal(_rows(task, seed=4).rows(np.arange(20)).tokens, whole)
    assert len({row.tobytes() for row in whole}) == 20
    assert whole.max() < 50


@pytest.mark.parametrize("seq_len", [3, 40, 41])
def test_copy_repeats_exactly_and_predicts_only_the_repetition(seq_len: int) -> None:
    batch = _rows("copy", seq_len).rows(np.arange(10))
    half = (seq_len - 1) // 2
    assert batch.loss_mask is not None
    for tokens, mask in zip(batch.tokens, batch.loss_mask, strict=True):
        assert tokens[:half].tolist() == tokens[half + 1 : 2 * half + 1].tolist()
        assert tokens[half] == 49
        assert np.flatnonzero(mask).tolist() == list(range(half + 1, 2 * half + 1))


def test_needle_is_hidden_once_and_asked_for_at_the_end() -> None:
    batch = _rows("needle", 100, 1000).rows(np.arange(200))
    assert batch.loss_mask is not None
    places = []
    for tokens, mask in zip(batch.tokens, batch.loss_mask, strict=True):
        (place,) = np.flatnonzero(tokens == 999)
        (question,) = np.flatnonzero(tokens == 998)
        assert question == 93
        assert tokens[place + 1 : place + 7].tolist() == tokens[question + 1 :].tolist()
        assert np.flatnonzero(mask).tolist() == [96, 97, 98, 99]
        assert place + 7 <= question
        places.append(place)
    assert min(places) < 10
    assert max(places) > 76


def _facts_and_questions(task: str, tokens: np.ndarray, mask: np.ndarray) -> tuple[list[int], dict[int, int]]:
    """Ids before the questions that are not filler, and key → answer."""
    questions = len(tokens) - 32
    assert np.flatnonzero(mask).tolist() == list(range(questions + 1, len(tokens), 2))
    asked = {int(k) - 64: int(v) - 80 for k, v in tokens[questions:].reshape(-1, 2).astype(int)}
    assert sorted(asked) == list(range(16))
    places = np.flatnonzero(tokens[:questions] < 84)
    assert places.max() < questions - len(tokens) // 8
    return tokens[places].astype(int).tolist(), asked


@pytest.mark.parametrize("seq_len", [128, 512, 515])
def test_recall_asks_for_every_fact(seq_len: int) -> None:
    batch = _rows("recall", seq_len, 128).rows(np.arange(20))
    assert batch.loss_mask is not None
    for tokens, mask in zip(batch.tokens, batch.loss_mask, strict=True):
        facts, asked = _facts_and_questions("recall", tokens, mask)
        assert {fact // 4: fact % 4 for fact in facts} == asked


def test_recall_pairs_puts_the_value_behind_its_key() -> None:
    batch = _rows("recall_pairs", 512, 128).rows(np.arange(20))
    assert batch.loss_mask is not None
    for tokens, mask in zip(batch.tokens, batch.loss_mask, strict=True):
        facts, asked = _facts_and_questions("recall_pairs", tokens, mask)
        assert {key - 64: value - 80 for key, value in zip(facts[::2], facts[1::2], strict=True)} == asked


def test_tracking_follows_chains_of_four_variables() -> None:
    batch = _rows("tracking", 512, 128).rows(np.arange(50))
    assert batch.loss_mask is not None
    for tokens, mask in zip(batch.tokens, batch.loss_mask, strict=True):
        facts, asked = _facts_and_questions("tracking", tokens, mask)
        known: dict[int, int] = {}
        hops: dict[int, int] = {}
        for variable, operand in zip(facts[::2], facts[1::2], strict=True):
            known[variable - 64] = operand - 80 if operand >= 80 else known[operand - 64]
            hops[variable - 64] = 1 if operand >= 80 else hops[operand - 64] + 1
        assert known == asked
        assert sorted(hops.values()) == sorted([1, 2, 3, 4] * 4)


def test_far_recall_needs_ids_of_its_own() -> None:
    with pytest.raises(ConfigError, match="vocab_size=272"):
        _rows("recall", 512, 84)


def test_there_is_always_another_row() -> None:
    stream = IndexedRowStream(_rows("uniform"))
    stream.load_state_dict(stream.state_dict() | {"next_row": 2**60})
    assert stream.next_batch(2).row_ids.tolist() == [2**60, 2**60 + 1]


@pytest.mark.parametrize(("task", "seq_len"), [("copy", 2), ("needle", 13), ("uniform", 0), ("recall", 127)])
def test_rows_too_short_for_the_task_are_refused(task: str, seq_len: int) -> None:
    with pytest.raises(ConfigError):
        _rows(task, seq_len)


def test_unknown_tasks_are_named() -> None:
    with pytest.raises(ConfigError):
        _rows("sorting")


def _searched(task: str, tokens: np.ndarray, counted: int) -> int:
    """The position of the fact of a counted token, by looking for it in the row."""
    row = tokens.astype(int).tolist()
    if task == "copy":
        return counted - row.index(len(row) * 10) - 1
    if task == "needle":
        marker, query = (row.index(len(row) * 10 - back) for back in (0, 1))
        return marker + counted - query
    before, asked = row[: len(row) - 32], row[counted - 1] - 64
    if task == "recall":
        (place,) = [at for at, token in enumerate(before) if token // 4 == asked]
        assert before[place] % 4 == row[counted] - 80
        return place
    # Facts are two tokens, at even places.
    (place,) = [at for at in range(0, len(before), 2) if before[at] - 64 == asked]
    if task == "recall_pairs":
        assert before[place + 1] == row[counted]
    else:
        assert 64 <= before[place + 1] < 84
    return place + 1


@pytest.mark.parametrize("task", ["copy", "needle", "recall", "recall_pairs", "tracking"])
def test_facts_of_answers_lie_where_a_search_finds_them(task: str) -> None:
    rows, numbers = _rows(task, 256, 2561), np.asarray([13, 2, 7])
    batch = rows.rows(numbers)
    assert batch.loss_mask is not None
    places = rows.answer_places(numbers)
    counted = [(int(row), int(at)) for row, at in np.argwhere(batch.loss_mask)]
    assert [(place.row, place.query + 1) for place in places] == counted
    assert [place.fact for place in places] == [_searched(task, batch.tokens[row], at) for row, at in counted]


def test_rows_without_answers_have_no_facts() -> None:
    assert _rows("uniform").answer_places(np.arange(3)) == []
