"""Reference pages written from the code: commands with their options, exit codes, fields of a heartbeat."""

import inspect
import re
import types
from collections.abc import Iterator
from typing import Any, get_args

import typer

from nsa.errors import ExitCode
from nsa_train.cli.main import app
from nsa_train.record.heartbeat_record import RECORD_FIELDS, REQUIRED_FIELDS

NOTE = "<!-- Written by `python -m tools.docs.regenerate`. -->"


def commands_page() -> str:
    """Every command of `nsa` with its arguments and options, from typer's command tree."""
    leaves = list(leaf_commands(typer.main.get_command(app), "nsa"))
    lines = [
        "# Commands",
        "",
        NOTE,
        "",
        "`nsa COMMAND --help` prints the same. Settings of a run are given as `section.key=value` after the config",
        "file ([CONFIG.md](../CONFIG.md)). Every command ends with 0 if it did its work, 2 if the command line is",
        "wrong, and else with the code of its error ([exit codes](EXIT_CODES.md)); what a command adds to that is in",
        "its text.",
        "",
        "| command | what it does |",
        "|---|---|",
    ]
    lines += [f"| [`{name}`](#{name.replace(' ', '-')}) | {first_sentence(command.help)} |" for name, command in leaves]
    for name, command in leaves:
        lines += ["", f"## {name}", "", *command_section(name, command)]
    return "\n".join(lines) + "\n"


def leaf_commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Commands that do something, by their full names; groups and hidden ones are left out."""
    children = getattr(command, "commands", None)
    if children is None:
        yield name, command
        return
    for word, child in children.items():
        if not child.hidden:
            yield from leaf_commands(child, f"{name} {word}")


def command_section(name: str, command: Any) -> Iterator[str]:
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    arguments = [parameter for parameter in shown if parameter.param_type_name == "argument"]
    options = [parameter for parameter in shown if parameter.param_type_name == "option" and parameter.name != "help"]
    words = " ".join([name, *(argument_word(argument) for argument in arguments), *(["[OPTIONS]"] if options else [])])
    yield from ("```text", words, "```", "")
    yield inspect.cleandoc(command.help or "")
    if shown:
        yield from ("", "| argument or option | default | meaning |", "|---|---|---|")
    for argument in arguments:
        default = "required" if argument.required else default_text(argument)
        yield f"| `{argument_word(argument).strip('[]')}` | {default} | {cell(argument.help)} |"
    for option in options:
        names_of_option = ", ".join(f"`{word}`" for word in (*option.opts, *option.secondary_opts))
        default = "required" if option.required else default_text(option)
        yield f"| {names_of_option} | {default} | {cell(option.help)} |"


def argument_word(argument: Any) -> str:
    """Spell an argument as in a usage line: [NAME] if optional, NAME… if it may be given several times."""
    word = (argument.metavar or argument.name).upper().strip("[]")
    word += "…" if argument.nargs == -1 and not word.endswith(("…", "...")) else ""
    return word if argument.required else f"[{word}]"


def default_text(parameter: Any) -> str:
    value = parameter.default
    if value is None or value == [] or value == () or callable(value):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(getattr(value, "value", value))
    return f"`{text}`" if text else ""


def cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


def first_sentence(text: str | None) -> str:
    """Return a help text up to its first full stop or the end of its first paragraph."""
    paragraph = cell(inspect.cleandoc(text or "").split("\n\n")[0])
    return re.split(r"(?<=[.:;])\s", paragraph)[0].rstrip(".:;")


def exit_codes_page() -> str:
    lines = [
        "# Exit codes",
        "",
        NOTE,
        "",
        "What `nsa` commands and training runs end with (`nsa.errors.ExitCode`). The values never change: schedulers",
        "and scripts may rely on them. A code that is not in this table, for example exit code 4, does not come from",
        "`nsa`: a scheduler, a container or another program ended the process. Above 128 it was a signal: 137 is",
        "128 + 9, killed, often for lack of memory; 130 is Ctrl-C.",
        "",
        "| exit code | name | meaning |",
        "|---|---|---|",
    ]
    lines += [f"| {code.value} | `{code.name}` | {code.meaning} |" for code in ExitCode]
    lines += [
        "",
        "What to do after each of them: [runbook, section 3](../RUNBOOK.md#3-launch). Commands that check something",
        "use 0, 1 and 2 in a sense of their own: `nsa status` and `nsa watch --once` (0 healthy, 1 warning, 2",
        "critical), `nsa smoke`, the drill, `nsa gpu-check` and `nsa doctor --prove` (1: a check does not hold).",
    ]
    return "\n".join(lines) + "\n"


def heartbeat_page() -> str:
    lines = [
        "# Heartbeat fields",
        "",
        NOTE,
        "",
        "Every rank of a run appends one JSON object per line to `heartbeat_rank{N}.jsonl` in the run folder.",
        "`training.csv`, `metrics.json`, TensorBoard, W&B, MLflow and Prometheus are copies of these numbers. A field",
        "that does not apply is absent. Numbers that are not finite are the strings `NaN`, `Infinity` and `-Infinity`.",
        "",
        "| field | type | unit | meaning |",
        "|---|---|---|---|",
    ]
    for field in RECORD_FIELDS.values():
        kind = type_text(field.type) + (", always" if field.name in REQUIRED_FIELDS else "")
        lines.append(f"| `{field.name}` | {kind} | {field.unit} | {cell(field.about)} |")
    return "\n".join(lines) + "\n"


_JSON_WORDS = {float: "number", int: "whole number", str: "text", bool: "true or false"}
_JSON_LISTS = {float: "list of numbers", str: "list of texts"}


def type_text(kind: Any) -> str:
    """A field's type in JSON's words."""
    if isinstance(kind, types.UnionType):
        (kind,) = (each for each in get_args(kind) if each is not types.NoneType)
    if kind in _JSON_WORDS:
        return _JSON_WORDS[kind]
    item = get_args(kind)[0]
    return _JSON_LISTS.get(item) or f"list of {type_text(item).replace('list', 'lists', 1)}"


PAGES = {
    "docs/reference/COMMANDS.md": commands_page,
    "docs/reference/EXIT_CODES.md": exit_codes_page,
    "docs/reference/HEARTBEAT.md": heartbeat_page,
}
