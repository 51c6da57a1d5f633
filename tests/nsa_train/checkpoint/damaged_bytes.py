"""Files with flipped bits and a cut end, for readers that must refuse them with one kind of error."""

import random
from collections.abc import Iterator


def damaged_copies(whole: bytes, count: int) -> Iterator[bytearray]:
    """Copies of `whole` with one or eight flipped bits, half of them cut at a random place; the same on every call."""
    dice = random.Random(0)
    for _ in range(count):
        broken = bytearray(whole)
        for _ in range(dice.choice([1, 1, 8])):
            broken[dice.randrange(len(whole))] ^= 1 << dice.randrange(8)
        yield broken[: dice.choice([len(whole), dice.randrange(len(whole))])]
