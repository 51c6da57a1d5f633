"""Which text is kept: the rules, and nothing that was seen before."""

import hashlib
import re

MIN_WORDS = 50
MIN_LETTER_SHARE = 0.70
MIN_STOP_WORD_SHARE = 0.15
_STOP_WORD_LIST = """
a about after all also an and any are as at be been but by can do each for from has have how if in into is it its may
more most must no not of on one only or other out same should so some such than that the their them then there these
they this those to two up use used was we were what when where which while who will with would you your
"""
_STOP_WORDS = frozenset(_STOP_WORD_LIST.split())
# Headings and one-line entries recur rightly; a paragraph of this length that recurs is boilerplate.
_MIN_PARAGRAPH_CHARS = 60


def stop_word_share(words: list[str]) -> float:
    return sum(word in _STOP_WORDS for word in words) / max(1, len(words))


def is_good_english(text: str) -> bool:
    words = re.findall(r"[a-z']+", text.lower())
    if len(words) < MIN_WORDS or stop_word_share(words) < MIN_STOP_WORD_SHARE:
        return False
    neither_letter_nor_space = re.sub(r"[^\W\d_]+|\s+", "", text)
    return len(neither_letter_nor_space) <= (1 - MIN_LETTER_SHARE) * len(text)


class Deduplicator:
    """Remembers paragraphs by hash across all documents it is shown."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def fresh(self, text: str) -> str:
        """The text without paragraphs that came before."""
        kept = []
        for paragraph in text.split("\n\n"):
            if len(paragraph) >= _MIN_PARAGRAPH_CHARS:
                words = " ".join(paragraph.lower().split())
                key = hashlib.blake2b(words.encode(), digest_size=12).digest()
                if key in self._seen:
                    continue
                self._seen.add(key)
            kept.append(paragraph)
        return "\n\n".join(kept)
