"""Sections of settings made from dataclasses of options: type, limits, unit, default and description of each."""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, create_model

from nsa.option_fields import LayerOption, options_of
from nsa_train.config.setting_types import ConfigSection, MayChangeOnResume, SettingUnit


def option_section(
    cls: type, section: str, *, without: tuple[str, ...] = (), base: type[ConfigSection] = ConfigSection
) -> Any:
    """A section with the settings of these options that stand in it, after those of `base`."""
    settings = {each.setting.removeprefix(f"{section}."): each for each in options_of(cls) if _is_in(each, section)}
    definitions: dict[str, Any] = {
        key: (_type(each), Field(default=each.usual, description=each.about))
        for key, each in settings.items()
        if key not in without
    }
    return create_model(f"{cls.__name__}Section", __base__=base, **definitions)


def _is_in(option: LayerOption, section: str) -> bool:
    return option.setting.rpartition(".")[0] == section


def _type(option: LayerOption) -> Any:
    """The field's type with its limits and unit, as `nsa_train.config.setting_types` spells them."""
    optional = type(None) in get_args(option.type)
    inner: Any = next(part for part in get_args(option.type) if part is not type(None)) if optional else option.type
    if option.choices and inner is str:
        inner = Literal[option.choices]
    limits: dict[str, Any] = dict(ge=option.at_least, gt=option.above, le=option.at_most)
    if bounds := {name: limit for name, limit in limits.items() if limit is not None}:
        inner = Annotated[inner, Field(**bounds)]
    if option.unit:
        inner = Annotated[inner, SettingUnit(option.unit)]
    if optional:
        inner = inner | None
    return Annotated[inner, MayChangeOnResume()] if option.may_change else inner
