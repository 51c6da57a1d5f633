"""Generation over Transformers: a row of a batch gets the tokens it gets alone, and ends when and how it says."""

import signal

import pytest
import torch

from nsa.errors import ConfigError
from nsa_train.infer import SamplingSettings, load_model
from nsa_train.infer.generate import generate_batch
from tests.trained_runs import write_run

GREEDY = dict(temperature=0, max_new_tokens=24)
PROMPTS = ["A", "Install the package with apt and read the manual first, " * 3, "Größe: 12 €", ""]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_model(write_run(tmp_path_factory.mktemp("run")), device="cpu")


def tokens(result) -> list[list[int]]:
    return [completion.tokens for completion in result.completions]


def test_greedy_tokens_are_those_of_plain_generate(loaded):
    result = loaded.generate_batch(PROMPTS[1:2], **GREEDY)
    ids = torch.tensor(loaded.encode(PROMPTS[1:2]))
    plain = loaded.model.generate(ids, do_sample=False, max_new_tokens=24, eos_token_id=256, pad_token_id=256)
    assert tokens(result) == [plain[0, ids.shape[1] :].tolist()]


def test_rows_of_different_lengths_get_the_tokens_they_get_alone(loaded):
    together = loaded.generate_batch(PROMPTS, **GREEDY)
    alone = [tokens(loaded.generate_batch([prompt], **GREEDY))[0] for prompt in PROMPTS]
    assert tokens(together) == alone
    assert [completion.prompt_tokens for completion in together.completions] == [1, 168, 15, 1]
    assert loaded.generate(PROMPTS, **GREEDY) == [completion.text for completion in together.completions]


@pytest.mark.parametrize("chunk", [1, 17, 1000])
def test_prefill_in_chunks_changes_no_token(loaded, chunk):
    whole = loaded.generate_batch(PROMPTS, prefill_chunk=10_000, **GREEDY)
    assert tokens(loaded.generate_batch(PROMPTS, prefill_chunk=chunk, **GREEDY)) == tokens(whole)


def test_prefill_reports_its_columns_chunk_by_chunk(loaded):
    told: list[tuple[int, int]] = []
    settings = SamplingSettings(prefill_chunk=50, **GREEDY)
    generate_batch(loaded, loaded.encode(PROMPTS), settings, on_prefill=lambda done, total: told.append((done, total)))
    assert told == [(50, 168), (100, 168), (150, 168), (168, 168)]
    told.clear()
    settings = SamplingSettings(**GREEDY)  # the run's own chunk, 48
    generate_batch(loaded, loaded.encode(PROMPTS), settings, on_prefill=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == [48, 96, 144, 168]


def test_pieces_arrive_while_tokens_are_made_and_are_the_text(loaded):
    pieces: dict[int, list[str]] = {0: [], 1: []}
    settings = SamplingSettings(**GREEDY)
    ids = loaded.encode(PROMPTS[:2])
    result = generate_batch(loaded, ids, settings, on_text=lambda row, piece: pieces[row].append(piece))
    assert ["".join(pieces[row]) for row in (0, 1)] == [completion.text for completion in result.completions]
    assert len(pieces[0]) > 5


def test_a_seed_repeats_a_sample_and_leaves_the_callers_random_state_alone(loaded):
    sample = dict(max_new_tokens=24, temperature=1.0)
    state = torch.get_rng_state()
    first = loaded.generate_batch(PROMPTS[:2], seed=3, **sample)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.seed == 3
    assert tokens(loaded.generate_batch(PROMPTS[:2], seed=3, **sample)) == tokens(first)
    assert tokens(loaded.generate_batch(PROMPTS[:2], seed=4, **sample)) != tokens(first)
    drawn = loaded.generate_batch(PROMPTS[:2], **sample)
    assert tokens(loaded.generate_batch(PROMPTS[:2], seed=drawn.seed, **sample)) == tokens(drawn)


def test_top_k_one_is_greedy_and_greedy_has_no_seed(loaded):
    greedy = loaded.generate_batch(PROMPTS[:2], **GREEDY)
    assert greedy.seed is None
    assert tokens(loaded.generate_batch(PROMPTS[:2], max_new_tokens=24, temperature=2.0, top_k=1)) == tokens(greedy)
    narrow = loaded.generate_batch(PROMPTS[:2], max_new_tokens=24, temperature=2.0, top_p=1e-6)
    assert tokens(narrow) == tokens(greedy)


def test_without_top_k_every_token_can_be_drawn(loaded):
    """Transformers would keep the 50 likeliest by default."""
    drawn = loaded.generate_batch(["A"] * 64, temperature=50.0, top_p=None, max_new_tokens=4, seed=0)
    assert len({row[0] for row in tokens(drawn)}) > 50


@pytest.mark.parametrize("cut", [2, 9])
def test_a_stop_string_ends_its_own_row_only(loaded, cut):
    free = loaded.generate_batch(PROMPTS, **GREEDY)
    texts = [completion.text for completion in free.completions]
    stop = texts[0][cut : cut + 2]
    result = loaded.generate_batch(PROMPTS, stop=(stop,), **GREEDY)
    for text, before, completion in zip(texts, free.completions, result.completions, strict=True):
        assert completion.text == text.partition(stop)[0]
        assert completion.tokens == before.tokens[: len(completion.tokens)]
        assert completion.finish_reason == ("stop" if stop in text else "length")
    assert len(result.completions[0].tokens) < 24


def test_the_end_of_a_document_ends_a_row(loaded, tmp_path):
    model = load_model(write_run(tmp_path), device="cpu")
    end = tokens(model.generate_batch(PROMPTS[:2], **GREEDY))[0][5]
    model.model.config.eos_token_id = end
    result = model.generate_batch(PROMPTS[:2], **GREEDY)
    first = result.completions[0]
    assert first.finish_reason == "end"
    assert first.tokens.index(end) == len(first.tokens) - 1
    assert result.completions[1].tokens[:5] == tokens(loaded.generate_batch(PROMPTS[1:2], **GREEDY))[0][:5]


@pytest.fixture
def _interruptible():
    """Restore SIGINT as in a new process: a run that ended in this one leaves SIGINT at its default, which ends the
    process."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_an_interrupt_keeps_what_was_made(loaded):
    def interrupt(row: int, piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 5:
            signal.raise_signal(signal.SIGINT)

    pieces: list[str] = []
    settings = SamplingSettings(temperature=0, max_new_tokens=500)
    result = generate_batch(loaded, loaded.encode(["A"]), settings, on_text=interrupt)
    assert result.interrupted
    assert result.completions[0].finish_reason == "interrupted"
    assert result.completions[0].text == "".join(pieces)
    assert 5 <= len(result.completions[0].tokens) < 40
    whole = loaded.generate_batch(["A"], temperature=0, max_new_tokens=40)
    assert whole.completions[0].tokens[: len(result.completions[0].tokens)] == result.completions[0].tokens


def test_speed_and_memory_are_measured(loaded):
    result = loaded.generate_batch(PROMPTS, **GREEDY)
    assert result.prompt_tokens == 185
    assert result.new_tokens == 4 * 24
    assert result.decoded_tokens == 4 * 23
    assert result.prefill_s > 0
    assert result.decode_s > 0
    assert result.peak_memory_mib > 50


@pytest.mark.parametrize(
    "wrong",
    [
        dict(max_new_tokens=0), dict(temperature=-1.0), dict(top_k=0), dict(top_p=0.0), dict(top_p=1.5),
        dict(seed=-1), dict(stop=("",)), dict(prefill_chunk=0), dict(temperature=float("nan")),
        dict(temperature=1e-300),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SamplingSettings(**wrong)


def test_no_prompt_is_refused(loaded):
    with pytest.raises(ConfigError, match="prompt"):
        loaded.generate([])
