"""Options as fields of dataclasses: default, description, limits and names of each are written once, beside it.

Needs no torch. Settings, `config.json`, messages and reference pages are derived from `options_of(cls)`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from nsa.errors import BrokenRule

_T = TypeVar("_T")
_OPTION = "option"


@dataclass(frozen=True, kw_only=True)
class LayerOption:
    """One option: what `option` was given, its place in the dataclass and its type."""

    name: str
    """As an argument of `NSAAttention`."""
    about: str
    default: Any
    setting: str
    """As a setting of a run, dotted."""
    exported: str
    """As a key of config.json."""
    unit: str
    at_least: float | None
    above: float | None
    at_most: float | None
    because: str
    choices: tuple[str, ...]
    usual: Any
    """Default of the setting and of config.json, where the argument has none."""
    may_change: bool
    per_layer: bool
    path: tuple[str, ...] = ()
    type: Any = None

    def broken_limit(self, value: Any, names: "OptionNames") -> BrokenRule | None:
        """The rule that a value breaks by itself, whatever the other options are."""
        name = names[self.name]
        if self.choices and value not in self.choices:
            options = ", ".join(self.choices)
            return BrokenRule((name,), f"{name} is {value!r}: there is no such option. Use one of: {options}.")
        if value is None or isinstance(value, (str, bool, Mapping)):
            return None
        reason = self.because
        fix = f"Set e.g. {name}={self.at_least if self.usual is None else self.usual}."
        if isinstance(value, float) and not math.isfinite(value):
            return BrokenRule((name,), f"{name} ({value}) must be finite{reason}. {fix}")
        for fits, limit in (
            (self.at_least is None or value >= self.at_least, f"at least {self.at_least}"),
            (self.above is None or value > self.above, f"above {self.above}"),
            (self.at_most is None or value <= self.at_most, f"at most {self.at_most}"),
        ):
            if not fits:
                return BrokenRule((name,), f"{name} ({value}) must be {limit}{reason}. {fix}")
        return None


class OptionNames(Mapping[str, str]):
    """Spelling of options in messages: by default as the library's arguments, else by a mapping of some of them."""

    def __init__(self, spelling: Mapping[str, str] | None = None) -> None:
        self._spelling = spelling or {}

    def __getitem__(self, name: str) -> str:
        return self._spelling.get(name, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._spelling)

    def __len__(self) -> int:
        return len(self._spelling)

    def __getattr__(self, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return self[name]


ARGUMENT_NAMES = OptionNames()


def option(
    default: Any = MISSING,
    about: str = "",
    *,
    section: str = "",
    name: str = "",
    key: str = "",
    exported: str = "",
    unit: str = "",
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    because: str = "",
    choices: Sequence[str] = (),
    usual: Any = None,
    may_change: bool = False,
    per_layer: bool = False,
) -> Any:
    """A field that is an option of the attention.

    section, key: where it stands among the settings of a run, by default `SECTION` of its class or `nsa`, and its name.
    name: as an argument, if it is not the field's name. exported: in config.json, if it is not the argument's name.
    usual: default of the setting, for an argument without one. because: why it has limits.
    may_change: a resumed run may have another value. per_layer: layers of one model may differ in it, and a setting of
        the model lists the values.
    """
    described = LayerOption(
        name=name, about=about, default=default, setting=f"{section}.{key}", exported=exported, unit=unit,
        at_least=at_least, above=above, at_most=at_most, because=f": {because}" if because else "",
        choices=tuple(choices), usual=default if usual is None else usual, may_change=may_change, per_layer=per_layer,
    )  # fmt: skip
    return field(metadata={_OPTION: described}, **({} if default is MISSING else {"default": default}))


_types: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def options_of(cls: Any) -> tuple[LayerOption, ...]:
    """Every option of a dataclass and of the dataclasses among its fields, in their order."""
    return _options(cls)


def _listed_options(cls: Any) -> tuple[LayerOption, ...]:
    types, listed = _types(cls), []
    for each in fields(cls):
        described: LayerOption | None = each.metadata.get(_OPTION)
        if described is not None:
            name, (section, key) = described.name or each.name, described.setting.split(".")
            literal = get_args(types[each.name]) if get_origin(types[each.name]) is Literal else ()
            listed.append(
                replace(
                    described,
                    name=name,
                    path=(each.name,),
                    type=types[each.name],
                    choices=described.choices or literal,
                    exported=described.exported or name,
                    setting=f"{section or getattr(cls, 'SECTION', 'nsa')}.{key or name}",
                )
            )
        elif is_dataclass(types[each.name]):
            listed += [replace(inner, path=(each.name, *inner.path)) for inner in options_of(types[each.name])]
    return tuple(listed)


_options: Callable[[Any], tuple[LayerOption, ...]] = cache(_listed_options)


def option_values(config: Any) -> dict[str, Any]:
    """The values of all options by their names as arguments; `from_options` undoes it."""
    return {each.name: attrgetter(".".join(each.path))(config) for each in options_of(type(config))}


def from_options(cls: type[_T], values: Mapping[str, Any]) -> _T:
    """An instance with these values of its options, the others at their defaults. No rule is checked, so that
    `broken_rules` of the result can list them all."""
    own: dict[str, Any] = {}
    types = _types(cls)
    names = {each.path[0]: each.name for each in options_of(cls) if len(each.path) == 1}
    for each in fields(cls):  # type: ignore[arg-type]
        if each.name not in names:
            if is_dataclass(types[each.name]):
                own[each.name] = from_options(types[each.name], values)
        elif names[each.name] in values:
            own[each.name] = values[names[each.name]]
        elif each.default is not MISSING:
            own[each.name] = each.default
    instance = object.__new__(cls)
    vars(instance).update(own)
    return instance


def broken_limits(config: Any, names: OptionNames = ARGUMENT_NAMES) -> Iterator[BrokenRule]:
    """Options whose values are not among their choices or within their limits."""
    values = option_values(config)
    rules = (each.broken_limit(values[each.name], names) for each in options_of(type(config)))
    return (rule for rule in rules if rule is not None)
