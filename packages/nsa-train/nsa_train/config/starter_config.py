"""Starter config: a shipped config rewritten for a folder of the user, with a comment on every setting.

Paths of data, tokenizer and run folder point into the folder, in the settings and in the commands of the header alike.
"""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from nsa.errors import ConfigError
from nsa_train.config.layer import nearest
from nsa_train.config.load import load
from nsa_train.config.schema import settings
from nsa_train.config.setting_types import unit
from nsa_train.shipped import CONFIGS, CORPORA, CORPUS, config_names, config_text

FIRST_CONFIG = "cpu_demo"
"""The shipped config of a first model: what `nsa init` starts from by default, and what `nsa demo` trains."""
CONFIG_FILE, TEXT_FOLDER, DATA_FOLDER, RUN_FOLDER = "config.yaml", "text", "data", "run"
TOKENIZER_FILE = "bpe.json"
_COMMENT_COLUMN = 32

_COMMAND = re.compile(r"^#   (nsa .*)$")
_SETTING = re.compile(r"^(?P<indent> *)(?P<key>\w+): *(?P<value>[^#]*?) *(?P<comment>#.*)?$")
_PLAIN_IN_YAML = re.compile(r"[\w./][\w./+-]*")
_PATHS_NOTE = "# Paths are relative to the folder in which a command is started."


class StarterConfig(NamedTuple):
    text: str
    """Content of the config file."""
    commands: tuple[str, ...]
    """Shell commands to run next, as the header lists them."""
    reads_text: bool
    """Whether one of the commands reads the text folder."""
    corpus: Path
    """The shipped corpus that the config was written for."""


class _ShippedConfig(NamedTuple):
    name: str
    purpose: str
    hardware: str


def shipped_configs() -> list[_ShippedConfig]:
    """The shipped configs for new runs, with what their headers say about them."""
    names = [name for name in config_names() if "# Kept as a contract" not in config_text(name)]
    return [_described(name) for name in names]


def _described(name: str) -> _ShippedConfig:
    header = [line for line in config_text(name).splitlines() if line.startswith("#")]

    def entry(word: str) -> str:
        first = next(i for i, line in enumerate(header) if line.startswith(f"# {word}: "))
        parts = [header[first].removeprefix(f"# {word}: ")]
        for line in header[first + 1 :]:
            if not line.startswith("#  ") or _COMMAND.match(line):
                break
            parts.append(line.lstrip("# "))
        return " ".join(parts)

    return _ShippedConfig(name, entry("Purpose"), entry("Hardware"))


def make_starter(name: str, folder: Path) -> StarterConfig:
    """The shipped config `name` for a run in `folder`."""
    name = name.removesuffix(".yaml")
    if name not in config_names():
        guess = nearest(name, config_names())
        hint = f"Did you mean {guess}?" if guess else "`nsa init --list` prints them."
        raise ConfigError(f"there is no shipped config {name!r}. {hint}")
    moved = _moved_paths(name, folder)
    longest_first = sorted(moved, key=len, reverse=True)
    pattern = re.compile("|".join(rf"(?<![\w/]){re.escape(path)}(?![\w.])" for path in longest_first))

    def yaml_text(text: str) -> str:
        return text if _PLAIN_IN_YAML.fullmatch(text) else json.dumps(text, ensure_ascii=False)

    def replaced(text: str, quote: Callable[[str], str]) -> str:
        return pattern.sub(lambda match: quote(str(moved[match[0]])), text)

    lines: list[str] = []
    commands: list[str] = []
    section = ""
    for line in config_text(name).splitlines():
        if line.startswith("#"):
            command = _COMMAND.match(line)
            line = replaced(line, shlex.quote if command else str)
            if match := _COMMAND.match(line):
                commands.append(match[1].partition("  #")[0].rstrip())
        elif setting := _SETTING.match(line):
            if not setting["indent"]:
                section = setting["key"]
            if setting["value"]:
                value = replaced(setting["value"], yaml_text)
                key = f"{section}.{setting['key']}" if setting["indent"] else setting["key"]
                written = f"{setting['indent']}{setting['key']}: {value}"
                line = f"{written:<{_COMMENT_COLUMN - 2}}  {setting['comment'] or _comment(key)}"
        elif not line and _PATHS_NOTE not in lines:
            lines.append(_PATHS_NOTE)
        lines.append(line)
    commands = commands or [f"nsa train {shlex.quote(str(folder / CONFIG_FILE))}"]
    reads_text = any(shlex.quote(str(folder / TEXT_FOLDER)) in command for command in commands)
    corpus = next((corpus for corpus in CORPORA if corpus.stem in config_text(name)), CORPUS)
    return StarterConfig("\n".join(lines) + "\n", tuple(commands), reads_text, corpus)


def _moved_paths(name: str, folder: Path) -> dict[str, Path]:
    """Path in the shipped config → path in the user's folder."""
    config = load(CONFIGS / f"{name}.yaml")
    moved = {
        f"configs/{name}.yaml": folder / CONFIG_FILE,
        **{corpus.stem: folder / TEXT_FOLDER for corpus in CORPORA},
        config.train.out_dir: folder / RUN_FOLDER,
    }
    if config.data.path:
        moved[config.data.path] = folder / DATA_FOLDER
    if "/" in config.data.tokenizer:
        moved[config.data.tokenizer] = folder / TOKENIZER_FILE
    return moved


def _comment(key: str) -> str:
    field = settings()[key]
    measured = f" ({unit(field)})" if unit(field) else ""
    return f"# {(field.description or '').rstrip('.')}{measured}"
