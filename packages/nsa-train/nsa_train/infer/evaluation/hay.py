"""Hay: the text in which far tasks hide their sentences, and its built-in default.

Any text will do. Text like the model's own training data asks for range alone; foreign text asks for more.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from nsa.errors import DataError
from nsa.files import storage_errors
from nsa_train.data.source.resolve import open_source

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
