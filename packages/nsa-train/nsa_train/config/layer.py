"""One layer of settings (a profile, a file, the environment or a command line) with its problems, and dotted keys."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nsa_train.config.schema import RETIRED_KEYS, sections, settings


@dataclass(frozen=True)
class SettingText:
    """One value as text; the schema gives it its type, so `no` and `2e-4` are parsed as the setting needs."""

    text: str | None
    origin: str  # as RunConfig.origin reports it
    where: str  # location shown in messages, with a line number if there is one


@dataclass
class SettingsLayer:
    values: dict[str, SettingText] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    readable: bool = True

    def add(self, key: str, text: str | None, *, origin: str, where: str) -> None:
        """Store the value of a known key; a retired key is a notice, an unknown one or text not in UTF-8 a problem."""
        if text is not None and not _is_unicode(text):
            self.problems.append(f"{where}: {key} must be UTF-8 text (got {text!r}). Write it in UTF-8, paths too.")
        elif key in settings():
            self.values[key] = SettingText(text, origin, where)
        elif key in RETIRED_KEYS:
            self.notices.append(f"{where}: {key} is retired and ignored: {RETIRED_KEYS[key]}.")
        else:
            self.problems.append(f"{where}: {_unknown(key)}")


def _is_unicode(text: str) -> bool:
    """False for bytes of a command line that are not UTF-8, and for half a surrogate pair in a file."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested settings to dotted keys: {"train": {"lr": 1}} → {"train.lr": 1}."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def nearest(word: str, known: list[str] | tuple[str, ...]) -> str | None:
    """The known word closest to this one, or None if nothing is close."""
    by_lower = {candidate.lower(): candidate for candidate in known}
    matches = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def section_hint(name: str) -> str:
    guess = nearest(name, tuple(sections()))
    return f"Did you mean {guess}?" if guess else _sections_listed()


def _sections_listed() -> str:
    return f"Sections are {', '.join(name for name in sections() if '.' not in name)}."


def _unknown(key: str) -> str:
    """Why a key is unknown and which one was probably meant: the same name elsewhere first, then a similar name."""
    section, _, name = key.rpartition(".")
    if key in sections():
        return f"{key} is a section, not a setting. Set its keys one by one, e.g. {_keys_of(key)[0]}."
    if section and section not in sections():
        return f"unknown key {key}: there is no section {section}. {section_hint(section)}"
    if homes := [known for known in settings() if _name(known) == name]:
        place = "it belongs to another section" if section else "it belongs below a section"
        return f"unknown key {key}: {place}. Did you mean {' or '.join(homes)}?"
    here = _keys_of(section)
    if like := nearest(name, [_name(known) for known in here]):
        return f"unknown key {key}. Did you mean {key.removesuffix(name)}{like}?"
    if like := nearest(name, [_name(known) for known in settings()]):
        homes = [known for known in settings() if _name(known) == like]
        return f"unknown key {key}. Did you mean {' or '.join(homes)}?"
    if section:
        return f"unknown key {key}. Keys of {section}: {', '.join(_name(known) for known in here)}."
    return f"unknown key {key}. {_sections_listed()}"


def _keys_of(section: str) -> list[str]:
    return [known for known in settings() if known.rpartition(".")[0] == section]


def _name(key: str) -> str:
    return key.rpartition(".")[2]
