"""One layer of settings (a profile, a file, the environment or a command line) with its problems; reads YAML files.

The YAML text is composed, not constructed: a scalar stays text and the schema gives it its type. This avoids the traps
of YAML 1.1 (`2e-4` is a string, `no` is false, `12:30` is 750) and creates no Python objects from the file.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from nsa.files import open_regular
from nsa_train.config.schema import RETIRED_KEYS, sections, settings
from nsa_train.config.setting_types import TEXT_OR_LIST
from nsa_train.shipped import config_names

_MOST_BYTES = 1 << 18
_NULLS = ("", "~", "null", "Null", "NULL")


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


def _section_hint(name: str) -> str:
    guess = nearest(name, tuple(sections()))
    return f"Did you mean {guess}?" if guess else _sections_listed()


def _sections_listed() -> str:
    return f"Sections are {', '.join(name for name in sections() if '.' not in name)}."


def _unknown(key: str) -> str:
    """Explain why a key is unknown; suggest the same name in another section, else a similar name."""
    section, _, name = key.rpartition(".")
    if key in sections():
        return f"{key} is a section, not a setting. Set its keys one by one, e.g. {_keys_of(key)[0]}."
    if section and section not in sections():
        return f"unknown key {key}: there is no section {section}. {_section_hint(section)}"
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


def read_yaml(path: Path, *, origin: str | None = None) -> SettingsLayer:
    """Read one file. The origin of a value is `path:line`, unless `origin` names the whole file."""
    layer = SettingsLayer()
    root = _compose(path, layer)
    if root is None:
        layer.readable = False
        return layer
    _add_section(root, path, "", origin, layer)
    return layer


def _add_section(section: yaml.MappingNode, path: Path, prefix: str, origin: str | None, layer: SettingsLayer) -> None:
    for name, node, line in _pairs(section, path, prefix, layer):
        key, where = f"{prefix}{name}", f"{path}:{line}"
        if "." in name:
            outer, _, inner = name.rpartition(".")
            layer.problems.append(f"{where}: {key} is written with a dot. In a file, write {inner} below {outer}:")
        elif key not in sections():
            _add_value(key, node, where, origin, layer)
        elif isinstance(node, yaml.MappingNode):
            _add_section(node, path, f"{key}.", origin, layer)
        elif not _is_null(node):
            layer.problems.append(f"{where}: {key} is a section. Write its keys below it, indented by two spaces.")


def _compose(path: Path, layer: SettingsLayer) -> yaml.MappingNode | None:
    if path.is_dir():
        layer.problems.append(f"{path} is a folder, not a config file.{_config_inside(path)}")
        return None
    try:
        with open_regular(path) as file:  # a pipe could be read once, and each rank reads its config
            raw = file.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            layer.problems.append(f"{path}: larger than {_MOST_BYTES >> 10} KiB: not a config file. Check the path.")
            return None
        root = yaml.compose(raw.decode("utf-8-sig"), Loader=yaml.SafeLoader)
    except FileNotFoundError:
        layer.problems.append(f"{path}: no such file.{_similar_file(path)}")
    except (OSError, UnicodeDecodeError) as error:
        layer.problems.append(f"{path}: cannot be read as text ({error}).")
    except RecursionError:  # the parser calls itself for every level
        layer.problems.append(f"{path}: nested too deeply. A config has sections, and keys below them.")
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}" if mark else f"{path}"
        tab = "\\t" in (error.problem or "")
        tip = "Indent with spaces, not tabs." if tab else "Check indentation and colons here and on the line above."
        layer.problems.append(f"{place}: not valid YAML ({error.problem or error.context}). {tip}")
    except yaml.YAMLError as error:
        layer.problems.append(f"{path}: not valid YAML ({' '.join(str(error).split())}).")
    else:
        if isinstance(root, yaml.MappingNode):
            return root
        content = "empty" if root is None else "not a mapping of sections"
        layer.problems.append(
            f"{path}: the file is {content}. Begin with a section such as `train:`; see docs/CONFIG.md."
        )
    return None


def _pairs(
    node: yaml.MappingNode, path: Path, prefix: str, layer: SettingsLayer
) -> Iterator[tuple[str, yaml.Node, int]]:
    """Key, value and line of each entry; a duplicate key is a problem, because YAML would silently keep the last."""
    first_line: dict[str, int] = {}
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, yaml.ScalarNode):
            layer.problems.append(f"{path}:{line}: a key must be a plain word.")
        elif key_node.tag == "tag:yaml.org,2002:merge":
            layer.problems.append(
                f"{path}:{line}: merge keys (<<) are not supported: every value has one line. Write the keys out."
            )
        elif (key := key_node.value) in first_line:
            layer.problems.append(
                f"{path}:{line}: {prefix}{key} is a duplicate of line {first_line[key]}. Keep one of them."
            )
        else:
            first_line[key] = line
            yield key, value, line


def _add_value(key: str, node: yaml.Node, where: str, origin: str | None, layer: SettingsLayer) -> None:
    takes_list = key in settings() and TEXT_OR_LIST in settings()[key].metadata
    items: list[Any] = node.value if isinstance(node, yaml.SequenceNode) else [None]
    if isinstance(node, yaml.ScalarNode):
        layer.add(key, None if _is_null(node) else node.value, origin=origin or where, where=where)
    elif takes_list and all(isinstance(item, yaml.ScalarNode) for item in items):
        if sum(len(item.value) for item in items) > _MOST_BYTES:  # aliases name one long text many times
            layer.problems.append(f"{where}: {key} is longer than a config file may be.")
            return
        text = f"[{', '.join(item.value for item in items)}]"
        layer.add(key, text, origin=origin or where, where=where)
    elif isinstance(node, yaml.MappingNode) and "." not in key:
        layer.problems.append(f"{where}: unknown section {key}. {_section_hint(key)}")
    else:
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
        layer.problems.append(f"{where}: {key} takes one value, not {kind}.")


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in _NULLS


def _config_inside(folder: Path) -> str:
    configs = sorted(folder.glob("*.yaml"))
    if not configs:
        return " Name a .yaml file; `nsa init FOLDER` writes one."
    return f" Did you mean {' or '.join(str(config) for config in configs[:3])}?"


def _similar_file(path: Path) -> str:
    siblings = [entry.stem for entry in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
    if guess := nearest(path.stem, siblings):
        return f" Did you mean {path.parent / guess}.yaml?"
    guess = nearest(path.stem, config_names())
    return f" Did you mean the shipped config {guess}?" if guess else " `nsa init --list` prints the shipped configs."
