"""Config loader: merges defaults, hardware profile, YAML file, environment and command line into one `RunConfig`.

A later layer overrides an earlier one, and each value keeps its origin. All problems of all layers are reported in one
error.
"""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from nsa.errors import ConfigError
from nsa_train.config import env, rules
from nsa_train.config.layer import SettingsLayer, SettingText, nearest, read_yaml
from nsa_train.config.schema import RunConfig, settings
from nsa_train.config.setting_types import choices, kind, plain, unit
from nsa_train.shipped import CONFIGS, config_file

_COMMAND_LINE = "command line"
_MOST_DIGITS = 18
_MOST_SHOWN = 120
_SHIPPED_PROFILES = CONFIGS / "profiles"


def load(
    file: str | Path | None = None, *, environ: Mapping[str, str] | None = None, overrides: Sequence[str] = ()
) -> RunConfig:
    """Resolve a run.

    `file` is the YAML file or the name of a shipped config (default: the one that `CONFIG` names in `environ`),
    `environ` the variables to apply (`nsa_train.config.env.snapshot()` for those of the process) and `overrides` words
    such as `train.lr=1e-4`.
    """
    environ = environ or {}
    file = file or environ.get(env.CONFIG_FILE)
    if not file:
        raise ConfigError("no config file was given. `nsa init my-run` writes one; name it, or set CONFIG to its path.")
    path = config_file(file)
    from_file = read_yaml(path)
    from_environ = env.read(environ)
    from_command_line = _read_overrides(overrides)
    from_profile = _read_profile({**from_file.values, **from_command_line.values}.get("profile"), path)

    layers = (from_profile, from_file, from_environ, from_command_line)
    values = {key: value for layer in layers for key, value in layer.values.items()}
    notices = [notice for layer in layers for notice in layer.notices]
    problems = [problem for layer in layers for problem in layer.problems]
    notices += _shorten_warmup(values)

    if from_file.readable and from_profile.readable:
        try:
            config = RunConfig.resolved(
                _nested(values), {key: value.origin for key, value in values.items()}, tuple(notices)
            )
        except ValidationError as error:
            problems += [text for details in error.errors() for text in _explain(details, values)]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n".join([f"{path} cannot be used, {count}:", *(f"  - {problem}" for problem in problems)]))
    return config


def _read_overrides(overrides: Sequence[str]) -> SettingsLayer:
    """`key=value` words of a command line; the later of two for the same key wins, and `null` means no value."""
    layer = SettingsLayer()
    for word in overrides:
        key, equals, text = word.partition("=")
        if equals:
            layer.add(key, None if text == "null" else text, origin=_COMMAND_LINE, where=_COMMAND_LINE)
        else:
            layer.problems.append(f"{_COMMAND_LINE}: {word!r} is not key=value. Write e.g. train.lr=1e-4.")
    return layer


def _read_profile(requested: SettingText | None, config_path: Path) -> SettingsLayer:
    if requested is None or requested.text in (None, "", RunConfig.TOY):
        return SettingsLayer()
    name = str(requested.text)
    if "/" in name or name.endswith((".yaml", ".yml")):
        candidates = [Path(name), config_path.parent / name]
    else:
        candidates = [folder / f"{name}.yaml" for folder in _profile_folders(config_path)]
    path = next(filter(os.path.isfile, candidates), None)  # False for an invalid name
    if path is None:
        known = sorted({file.stem for folder in _profile_folders(config_path) for file in folder.glob("*.yaml")})
        guess = nearest(name, known)
        hint = f"Did you mean {guess}?" if guess else f"There are {', '.join([*known, RunConfig.TOY])}."
        return SettingsLayer(problems=[f"{requested.where}: no hardware profile {name!r}. {hint}"], readable=False)
    layer = read_yaml(path, origin=f"profile {name}")
    if inner := layer.values.pop("profile", None):
        layer.problems.append(f"{inner.where}: a profile cannot name another profile. Write its values out.")
    return layer


def _profile_folders(config_path: Path) -> tuple[Path, ...]:
    """Next to the config first, so that a copied configs/ folder is self-contained."""
    return (config_path.parent / "profiles", Path("configs") / "profiles", _SHIPPED_PROFILES)


def _shorten_warmup(values: dict[str, SettingText]) -> Iterator[str]:
    """`--steps 100` on a long config is a short trial: shorten its warm-up with a notice, do not refuse it."""
    steps, warmup = values.get("train.steps"), values.get("train.warmup_steps")
    if not steps or not warmup or steps.origin != _COMMAND_LINE or warmup.origin == _COMMAND_LINE:
        return
    given_steps, given_warmup = _whole_number(steps), _whole_number(warmup)
    if given_steps is not None and given_warmup is not None and given_warmup > given_steps:
        values["train.warmup_steps"] = replace(steps, origin=f"{_COMMAND_LINE} train.steps={steps.text}")
        yield (
            f"train.warmup_steps is {warmup.text} ({warmup.where}) but the command line sets train.steps to "
            f"{steps.text}: warm-up is shortened to {steps.text}."
        )


def _whole_number(value: SettingText) -> int | None:
    """The number, or None if the schema will refuse it; Python does not convert text of thousands of digits."""
    text = str(value.text)
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def _nested(values: Mapping[str, SettingText]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        section = nested
        for part in path:
            section = section.setdefault(part, {})
        section[name] = value.text
    return nested


def _explain(details: ErrorDetails, values: Mapping[str, SettingText]) -> Iterator[str]:
    """The message for one pydantic error, with the location of each value."""
    if details["type"] == rules.BROKEN_RULES:
        for rule in details["ctx"]["broken"]:
            places = dict.fromkeys(values[key].where if key in values else f"default {key}" for key in rule.keys)
            yield f"{', '.join(places)}: {rule.message}"
        return
    prefixes = itertools.accumulate((str(part) for part in details["loc"]), "{}.{}".format)
    key = next(prefix for prefix in prefixes if prefix in settings())
    field, value = settings()[key], values[key]
    got = "no value" if value.text is None else repr(value.text)
    if len(got) > _MOST_SHOWN:
        got = f"{got[: _MOST_SHOWN // 2]}… ({len(got)} characters)"
    counted = f", in {unit(field)}" if unit(field) else ""
    guess = nearest(str(value.text), choices(field))
    fix = f"Did you mean {guess}?" if guess else f"Description: {field.description} Default: {plain(field.default)}."
    yield f"{value.where}: {key} must be {kind(field)}{counted} (got {got}). {fix}"
