"""Far tasks: text whose answer lies at a chosen depth of a document of a chosen length.

needle              one sentence gives the number of a name; the question asks for it
needle_multikey     eight such sentences, one of which is asked for
variable_tracking   variables set to numbers or to other variables; the question follows a chain of them
associative_recall  a table of sixteen keys and numbers, one of which is asked for

Tasks are text, so any tokenizer will do. An example is a function of (task, length, depth, number, seed, hay,
tokenizer) alone. Every candidate answer is drawn alike, so that a model that cannot find the answer scores 1 / number
of candidates.

The hay is the text around the sentences; any will do. Text like the training data asks for range alone, foreign text
for more.
"""

import hashlib
import random
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from nsa.errors import ConfigError, DataError
from nsa.files import storage_errors
from nsa_train.data.source.resolve import open_source
from nsa_train.record.evaluations import FAR

MOST_CHARACTERS = 8_000_000
"""Text beyond this is not read."""

BUILT_IN = """
The road follows the river for most of the morning and leaves it only where the valley becomes too narrow for both.
Farmers here cut the grass late in summer, when the seeds have fallen and the weather is dry. A bridge of grey stone
carries the road to the other side, and from its middle one can see the mill and the orchard behind it. Nobody remembers
who planted the oldest trees. The baker opens before sunrise, and by the time the school bell rings most of the bread is
gone. On market days the square fills with carts, and the noise can be heard from the hills. Rain comes from the west,
and people look at the clouds over the ridge before they hang out their washing. The library keeps its books on two
floors and its maps in wide drawers that are hard to open. A teacher once counted the steps of the tower and wrote the
number on the wall, where it has been painted over since. In winter the lake freezes near the shore first. The boats are
pulled up on the sand and covered with canvas until spring. Children learn to skate as soon as they can walk. The
station has one platform, a clock that is always a little late, and a garden that the porter looks after. Trains stop
there twice a day. Letters from the city arrive in the afternoon and are sorted on a long wooden table. The carpenter
makes chairs in the dark months and repairs roofs in the bright ones. His tools hang in the order in which he uses them.
A path behind the church leads up through the forest to a meadow with a spring. The water is cold even in August.
Shepherds rest there at noon and tell each other what they have seen on the way. Some of the stories are true. When the
wind turns, the smell of the sea reaches the village, although the coast is a day's walk away. The old lighthouse has
been closed for years and is now a place for birds. Wheat grows on the southern slopes and potatoes on the northern
ones. A cellar keeps them cool until they are sold. The doctor visits every second week and stays for dinner if the
snow is deep. Two brothers run the inn, and they disagree about everything except soup. Their guests do not mind. In the
evening somebody always plays the piano in the back room, slowly at first. The lamps along the street are lit one after
another, and the last of them stands where the road begins to climb again.
"""

_CANDIDATES = 8
_CHAINS, _HOPS = 4, 3
_PAIRS = 16
_SENTENCE_ENDS = (".", "!", "?", ":")
_BACK_TO_SENTENCE = 40
"""Words that a hidden sentence is moved back at most, to stand between two sentences of the hay; a tenth of all at
most."""
_ADJECTIVE_LIST = """
amber ancient bold brave brisk broad calm clever copper coral crimson dusty eager early fierce frozen gentle golden
hidden hollow humble ivory jolly lively lonely lucky mellow misty noble olive patient plain polite proud quiet rapid
rustic scarlet silent silver sleepy slender solemn steady stormy sturdy swift tender tidy violet
"""
_NOUN_LIST = """
badger beacon beetle bishop candle canyon castle cobbler comet cricket dolphin dragon falcon ferry fiddle forest garden
glacier goblet hammer harbor heron island jackal kettle lantern lizard magnet marble meadow mirror otter parrot pebble
pigeon pillow rabbit raven saddle sailor sparrow spider temple thistle tiger tunnel turtle walrus wizard
"""
_ADJECTIVES, _NOUNS = _ADJECTIVE_LIST.split(), _NOUN_LIST.split()

_CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class HayText:
    """Words of a text, taken in order from any place and again from the start at the end."""

    name: str
    text: str

    def __post_init__(self) -> None:
        if not self.words:
            raise DataError(f"{self.name} holds no words to hide a sentence in. Give a text file, or leave --hay out.")

    @cached_property
    def words(self) -> Sequence[str]:
        return self.text.split()

    def piece(self, start: int, n_words: int) -> list[str]:
        return [self.words[(start + place) % len(self.words)] for place in range(n_words)]


def built_in_hay() -> HayText:
    return HayText("built-in text", BUILT_IN)


def hay_of_file(path: Path) -> HayText:
    """A plain text file, or the documents of parquet or JSONL files."""
    if path.suffix in (".txt", ".md", ".rst", "") and path.is_file():
        with storage_errors(f"{path} cannot be read", fix="Give a text file."):
            return HayText(str(path), path.read_bytes()[:MOST_CHARACTERS].decode("utf-8", "replace"))
    source = open_source(str(path))
    documents = (document.text for unit in range(len(source)) for document in source.read(unit))
    return hay_of_texts(str(path), documents)


def hay_of_texts(name: str, texts: Iterable[str]) -> HayText:
    parts, size = list[str](), 0
    for text in texts:
        parts.append(text)
        size += len(text)
        if size >= MOST_CHARACTERS:
            break
    return HayText(name, "\n".join(parts))


class _TaskText(NamedTuple):
    """Sentences that a task hides, and its question, without the hay."""

    groups: tuple[tuple[str, ...], ...]
    """Sentences to hide, in the order they must keep within a group. The first of group 0 goes to the asked depth."""
    question: str
    answer: str
    candidates: tuple[str, ...]
    """The answer among others, in random order."""


@dataclass(frozen=True)
class FarExample:
    task: str
    length: int
    depth: float
    prompt: str
    answer: str
    candidates: tuple[str, ...]
    needle: str
    """The first sentence that leads to the answer."""
    needle_at: int
    """Place in the prompt at which it begins, in characters."""


def make_example(
    task: str, hay: HayText, count_tokens: _CountTokens, *, length: int, depth: float, number: int, seed: int = 0
) -> FarExample:
    """Make example `number`, with as many words of hay as fit into `length` tokens, the answer included."""
    digest = hashlib.blake2b(repr((task, length, depth, number, seed)).encode(), digest_size=8).digest()
    draw = random.Random(int.from_bytes(digest, "big"))
    start = draw.randrange(len(hay.words))
    words = hay.piece(start, length)
    text = FAR_TASKS[task](_Names(draw, hay.name, " ".join(words)))
    fractions = [sorted(draw.random() for _ in group) for group in text.groups]
    fractions[0] = sorted([depth, *(draw.uniform(depth, 1.0) for _ in text.groups[0][1:])])

    def assembled(n_words: int) -> tuple[str, int]:
        body, needle_at = _hide(words[:n_words], text.groups, fractions)
        return body + text.question, needle_at

    def fits(n_words: int) -> bool:
        return count_tokens(assembled(n_words)[0] + text.answer) <= length

    if not fits(0):
        raise ConfigError(
            f"{task} needs {count_tokens(assembled(0)[0] + text.answer)} tokens without any hay and the length is "
            f"{length}. Give a larger one to --lengths."
        )
    prompt, needle_at = assembled(_largest(fits, length))
    return FarExample(task, length, depth, prompt, text.answer, text.candidates, text.groups[0][0], needle_at)


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number of words up to `most` that fits, by bisection."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _hide(
    words: Sequence[str], groups: Sequence[Sequence[str]], fractions: Sequence[Sequence[float]]
) -> tuple[str, int]:
    """The hay with the sentences in it, and the character at which the first sentence of group 0 begins."""
    places = sorted(
        (_sentence_end(words, round(fraction * len(words))), g, order, sentence)
        for g, (group, at) in enumerate(zip(groups, fractions, strict=True))
        for order, (sentence, fraction) in enumerate(zip(group, at, strict=True))
    )
    text, begin, needle_at = "", 0, 0
    for place, g, order, sentence in places:
        text = _joined(text, " ".join(words[begin:place]))
        begin = place
        if (g, order) == (0, 0):
            needle_at = len(text) + bool(text)
        text = _joined(text, sentence)
    return _joined(text, " ".join(words[begin:])), needle_at


def _joined(text: str, more: str) -> str:
    return f"{text} {more}" if text and more else text or more


def _sentence_end(words: Sequence[str], place: int) -> int:
    """`place`, or the end of a sentence shortly before it, if there is one."""
    for back in range(min(place, _BACK_TO_SENTENCE, len(words) // 10)):
        if words[place - back - 1].endswith(_SENTENCE_ENDS):
            return place - back
    return place


class _Names:
    """Keys and numbers that occur neither in the hay nor twice."""

    def __init__(self, draw: random.Random, source: str, text: str) -> None:
        self.draw, self._source, self._text = draw, source, text
        self._words: set[str] = set()

    def name(self) -> str:
        return self._new(lambda: f"{self.draw.choice(_ADJECTIVES)} {self.draw.choice(_NOUNS)}")

    def code(self) -> str:
        return self._new(lambda: "".join(self.draw.choices(string.ascii_lowercase, k=4)))

    def number(self) -> str:
        return self._new(lambda: str(self.draw.randrange(10_000, 100_000)))

    def _new(self, make: Callable[[], str]) -> str:
        for _ in range(1000):
            word = make()
            if word not in self._words and word not in self._text:
                self._words.add(word)
                return word
        raise ConfigError(f"{self._source} holds all of 1,000 drawn names or numbers. Give another text as --hay.")


def _needle(names: _Names) -> _TaskText:
    return _needles(names, keys=1)


def _needle_multikey(names: _Names) -> _TaskText:
    return _needles(names, keys=_CANDIDATES)


def _needles(names: _Names, keys: int) -> _TaskText:
    """Hide a number for each key. With fewer keys than candidates, the others are numbers that do not occur."""
    asked = names.name()
    others = [names.name() for _ in range(keys - 1)]
    numbers = [names.number() for _ in range(_CANDIDATES)]
    fact = "The secret number of the {} is"
    sentences = [(f"{fact.format(name)} {value}.",) for name, value in zip([asked, *others], numbers, strict=False)]
    question = f"\n\nWhat is the secret number of the {asked}? {fact.format(asked)}"
    return _task(names, sentences, question, [f" {value}." for value in numbers])


def _variable_tracking(names: _Names) -> _TaskText:
    chains, numbers, asked = [], [], ""
    for _ in range(_CHAINS):
        variables, value = [names.code() for _ in range(_HOPS + 1)], names.number()
        links = [f"Variable {a} is set to the value of {b}." for b, a in pairwise(variables)]
        chains.append((f"Variable {variables[0]} is set to {value}.", *links))
        numbers.append(value)
        asked = asked or variables[-1]
    question = f"\n\nWhat is the value of variable {asked}? The value of variable {asked} is"
    return _task(names, chains, question, [f" {value}." for value in numbers])


def _associative_recall(names: _Names) -> _TaskText:
    pairs = [(names.code(), names.number()) for _ in range(_PAIRS)]
    lines = [f"{key} = {value}\n" for key, value in pairs]
    asked, _ = pairs[0]
    numbers = [f" {value}\n" for _, value in pairs]
    names.draw.shuffle(lines)
    return _task(names, [("\n" + "".join(lines),)], f"\n\n{asked} =", numbers)


def _task(names: _Names, groups: Sequence[tuple[str, ...]], question: str, answers: Sequence[str]) -> _TaskText:
    """The first of `answers` is the right one."""
    return _TaskText(tuple(groups), question, answers[0], tuple(names.draw.sample(answers, len(answers))))


FAR_TASKS: dict[str, Callable[[_Names], _TaskText]] = dict(
    zip(FAR, (_needle, _needle_multikey, _variable_tracking, _associative_recall), strict=True)
)
