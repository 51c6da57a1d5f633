"""Far tasks: length, place of the answer, no leak of it; an oracle solves them, a guess scores what chance gives."""

import math
import random
import re

import pytest

from nsa.errors import ConfigError, DataError
from nsa_train.data.tokenizer import load_tokenizer, train_bpe
from nsa_train.infer.evaluation.far_evaluation import CandidateScore, _wilson_interval, evaluate_far_task
from nsa_train.infer.evaluation.far_tasks import FAR_TASKS, HayText, built_in_hay, hay_of_file, make_example
from nsa_train.shipped import CORPUS

HIDDEN = re.compile(
    r"Variable \w{4} is set to [\w ]+\.|The secret number of the [\w ]+ is \d+\.|\n(?:\w{4} = \d{5}\n){16}"
)
DEPTHS = (0.0, 0.25, 0.5, 1.0)


@pytest.fixture(scope="module", params=["byte", "bpe"])
def tokenizer(request, tmp_path_factory):
    if request.param == "byte":
        return load_tokenizer("byte")
    return train_bpe([hay_of_file(CORPUS).text[:200_000]], 600, tmp_path_factory.mktemp("bpe") / "tokenizer.json")


@pytest.fixture
def encode(tokenizer):
    return lambda text: tokenizer.encode_batch([text])[0].tolist()


@pytest.fixture(scope="module", params=["built-in", "documents"])
def hay(request):
    return built_in_hay() if request.param == "built-in" else hay_of_file(CORPUS)


@pytest.mark.parametrize("task", FAR_TASKS)
def test_documents_are_as_long_as_asked_and_the_answer_lies_where_asked(task, hay, encode):
    longest_word = 60  # in tokens
    for number, (length, depth) in enumerate((length, depth) for length in (1024, 3000) for depth in DEPTHS):
        example = make_example(task, hay, lambda t: len(encode(t)), length=length, depth=depth, number=number)
        n_tokens = len(encode(example.prompt + example.answer))
        assert length - longest_word < n_tokens <= length
        assert example.prompt[example.needle_at :].startswith(example.needle)
        assert example.prompt.count(example.needle) == 1
        before, hay_words = (
            len(HIDDEN.sub(" ", text).split())
            for text in (example.prompt[: example.needle_at], example.prompt.rsplit("\n\n", 1)[0])
        )
        assert round(depth * hay_words) - max(40, hay_words // 10) <= before <= round(depth * hay_words)
        if depth == 0:
            assert example.needle_at == 0


@pytest.mark.parametrize("task", FAR_TASKS)
def test_the_answer_occurs_once_and_only_in_the_hidden_text(task, hay, encode):
    for number in range(6):
        example = make_example(task, hay, lambda t: len(encode(t)), length=1500, depth=0.4, number=number)
        value = example.answer.strip(" .\n")
        assert example.prompt.count(value) == 1
        assert value in example.needle
        assert example.candidates.count(example.answer) == 1
        assert len(set(example.candidates)) == len(example.candidates)
        assert len({len(candidate) for candidate in example.candidates}) == 1
        for candidate in example.candidates:
            other = candidate.strip(" .\n")
            assert example.prompt.count(other) == (0 if task == "needle" and other != value else 1)


def test_examples_depend_on_their_arguments_alone(encode):
    def example(**changes):
        words = dict(length=1024, depth=0.5, number=0, seed=0) | changes
        return make_example("needle", built_in_hay(), lambda t: len(encode(t)), **words)

    assert example() == example()
    for change in (dict(number=1), dict(seed=1), dict(depth=0.25), dict(length=900)):
        assert example(**change).answer != example().answer


def test_the_right_candidate_stands_at_every_place():
    for task in FAR_TASKS:
        examples = [make_example(task, built_in_hay(), len, length=1024, depth=0.5, number=n) for n in range(40)]
        places = [example.candidates.index(example.answer) for example in examples]
        assert len(set(places)) >= min(8, len(examples[0].candidates))


def solved(text: str) -> str:
    """The answer, by reading the text with regular expressions."""
    body, question = text.rsplit("\n\n", 1)
    if match := re.fullmatch(r"(\w{4}) =", question):
        (value,) = re.findall(rf"\n{match[1]} = (\d+)\n", body)
        return f" {value}\n"
    if match := re.match(r"What is the value of variable (\w+)\?", question):
        variable = match[1]
        while True:
            (source,) = re.findall(rf"Variable {variable} is set to (?:the value of )?(\w+)\.", body)
            if source.isdigit():
                return f" {source}."
            assert body.index(f"Variable {source} is set") < body.index(f"Variable {variable} is set")
            variable = source
    (name,) = re.findall(r"the secret number of the ([\w ]+)\?", question)
    (value,) = re.findall(rf"The secret number of the {name} is (\d+)\.", body)
    return f" {value}."


class Oracle:
    def __init__(self, tokenizer) -> None:
        self._decode = tokenizer.decode

    def __call__(self, prompt, candidates):
        right = solved(self._decode(prompt))
        hits = [self._decode(tokens) == right for tokens in candidates]
        return [CandidateScore(0.0 if hit else -9.0, hit, len(t)) for hit, t in zip(hits, candidates, strict=True)]


class Guess:
    """Random scores, or the same for all candidates."""

    def __init__(self, constant: bool) -> None:
        self._draw, self._constant = random.Random(0), constant

    def __call__(self, prompt, candidates):
        return [CandidateScore(-1.0 if self._constant else self._draw.random(), False, 1) for _ in candidates]


@pytest.mark.parametrize("task", FAR_TASKS)
def test_an_oracle_that_reads_the_text_gets_all_right(task, hay, tokenizer, encode):
    cells = evaluate_far_task(task, Oracle(tokenizer), encode, hay, lengths=[1024, 1500], depths=[0.0, 0.6], limit=2)
    assert [(cell.length, cell.depth) for cell in cells] == [(n, d) for n in (1024, 1500) for d in (0.0, 0.6)]
    assert all(cell.chosen == cell.exact == cell.examples == 2 for cell in cells)
    assert all(cell.answer_nats == 0 for cell in cells)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("task", FAR_TASKS)
def test_a_guess_scores_what_chance_gives(task, constant):
    encode = lambda text: list(text.encode())  # noqa: E731
    seen = []
    (cell,) = evaluate_far_task(
        task, Guess(constant), encode, built_in_hay(), lengths=[800], depths=[0.5], limit=200,
        after_example=lambda: seen.append(None),
    )  # fmt: skip
    record = cell.as_record()
    assert len(seen) == 200
    low, high = record["accuracy_interval"]
    spread = 3.5 * math.sqrt(record["chance"] * (1 - record["chance"]) / 200)
    assert abs(record["accuracy"] - record["chance"]) < spread
    assert low < record["accuracy"] < high
    assert record["exact_match"] == 0


def test_wilson_interval_against_published_values():
    assert _wilson_interval(0, 10) == pytest.approx((0.0, 0.2775), abs=5e-4)
    assert _wilson_interval(10, 10) == pytest.approx((0.7225, 1.0), abs=5e-4)
    assert _wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-4)


def test_what_cannot_be_made_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--lengths"):
        make_example("variable_tracking", built_in_hay(), len, length=200, depth=0.5, number=0)
    with pytest.raises(DataError):
        HayText("empty", " \n")
    every_number = HayText("digits", "".join(map(str, range(10_000, 100_000))))
    with pytest.raises(ConfigError, match="--hay"):
        make_example("needle", every_number, lambda text: len(text.split()), length=20, depth=0.5, number=0)
    (tmp_path / "some.txt").write_text("one two three")
    assert hay_of_file(tmp_path / "some.txt").words == ["one", "two", "three"]
