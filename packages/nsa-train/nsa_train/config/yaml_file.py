"""YAML reader: one file → one layer of settings with a line number for every value.

The text is composed, not constructed: a scalar stays text and the schema gives it its type. This avoids the traps of
YAML 1.1 (`2e-4` is a string, `no` is false, `12:30` is 750) and creates no Python objects from the file.
"""

from collections.abc import Iterator
from pathlib import Path

import yaml

from nsa.files import open_regular
from nsa_train.config.layer import SettingsLayer, nearest, section_hint
from nsa_train.config.schema import sections, settings
from nsa_train.config.setting_types import TEXT_OR_LIST
from nsa_train.shipped import config_names

_MOST_BYTES = 1 << 18
_NULLS = ("", "~", "null", "Null", "NULL")


def read(path: Path, *, origin: str | None = None) -> SettingsLayer:
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
    if isinstance(node, yaml.ScalarNode):
        layer.add(key, None if _is_null(node) else node.value, origin=origin or where, where=where)
    elif isinstance(node, yaml.SequenceNode) and _takes_list(key) and _is_flat(node):
        if sum(len(item.value) for item in node.value) > _MOST_BYTES:  # aliases name one long text many times
            layer.problems.append(f"{where}: {key} is longer than a config file may be.")
            return
        text = f"[{', '.join(item.value for item in node.value)}]"
        layer.add(key, text, origin=origin or where, where=where)
    elif isinstance(node, yaml.MappingNode) and "." not in key:
        layer.problems.append(f"{where}: unknown section {key}. {section_hint(key)}")
    else:
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
        layer.problems.append(f"{where}: {key} takes one value, not {kind}.")


def _takes_list(key: str) -> bool:
    return key in settings() and TEXT_OR_LIST in settings()[key].metadata


def _is_flat(node: yaml.SequenceNode) -> bool:
    return all(isinstance(item, yaml.ScalarNode) for item in node.value)


def _is_null(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in _NULLS


def _similar_file(path: Path) -> str:
    if path.stem in config_names():
        return f" `nsa init my-run --config {path.stem}` writes a copy of the shipped one."
    siblings = [entry.stem for entry in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
    guess = nearest(path.stem, siblings)
    return f" Did you mean {path.parent / guess}.yaml?" if guess else ""
