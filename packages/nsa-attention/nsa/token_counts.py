"""Numbers of tokens as options write them: 4096, or 4k for 4 × 1,024."""

from nsa.errors import ConfigError


def parse_count(word: str, option: str) -> int:
    """'4k' → 4096."""
    number, factor = (word[:-1], 1024) if word[-1:] in ("k", "K") else (word, 1)
    if not number.isdecimal() or int(number) < 1:
        raise ConfigError(f"{option} has {word!r}: it must be a number of tokens. Write e.g. {option} 4k or 4096.")
    return int(number) * factor


def parse_lengths(text: str, option: str = "--lengths") -> list[int]:
    """'2k,4096' → [2048, 4096]; words are separated by commas or spaces."""
    return [parse_count(word, option) for word in text.replace(",", " ").split() or [""]]


def spell(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)
