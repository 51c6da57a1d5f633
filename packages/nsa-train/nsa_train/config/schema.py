"""Configuration schema: every setting of a run with its type, default, unit and description (pydantic models).

Values are frozen and unknown names are refused. Importing this module does not import torch, so a config can be
checked and printed on a machine without it.
"""

import types
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Self

from pydantic import Field, PrivateAttr, model_validator
from pydantic.fields import FieldInfo

from nsa.core.attention_config import AttentionConfig
from nsa.errors import ConfigError
from nsa_train.config import rules
from nsa_train.config.model_sections import (
    PRESETS,
    KernelsConfig,
    ModelConfig,
    RopeScalingConfig,
    RuntimeConfig,
    SparseAttentionConfig,
    default_ffn_dim,
)
from nsa_train.config.setting_types import Changeable, ConfigSection, Text
from nsa_train.config.training_sections import DataConfig, ParallelConfig, TrackConfig, TrainConfig

__all__ = [
    "RETIRED_KEYS",
    "ConfigSection",
    "DataConfig",
    "KernelsConfig",
    "ModelConfig",
    "ParallelConfig",
    "RopeScalingConfig",
    "RunConfig",
    "RuntimeConfig",
    "SparseAttentionConfig",
    "TrackConfig",
    "TrainConfig",
    "default_ffn_dim",
    "sections",
    "settings",
]


class RunConfig(ConfigSection):
    """A resolved run. `nsa_train.config.load` builds one from files, environment and command line."""

    TOY: ClassVar[str] = "toy"

    profile: Changeable[Text | None] = Field(
        None,
        description="Hardware profile (configs/profiles/NAME.yaml, or a path); toy marks a config unfit for long runs.",
    )
    model: ModelConfig = ModelConfig()
    nsa: SparseAttentionConfig = SparseAttentionConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    kernels: KernelsConfig = KernelsConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    track: TrackConfig = TrackConfig()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    _notices: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def resolved(cls, values: Mapping[str, Any], origins: Mapping[str, str], notices: tuple[str, ...]) -> Self:
        config = cls.model_validate(values)
        config._origins = dict(origins)
        config._notices = notices
        return config

    @classmethod
    def of_saved(cls, values: Mapping[str, Any]) -> Self:
        """The settings that a run recorded; one that its version did not have gets the value it behaved by."""
        complete = dict(values)
        for key, value in VALUES_BEFORE.items():
            section, name = key.split(".")
            section_values = complete.get(section, {})
            if isinstance(section_values, Mapping):
                complete[section] = {name: value, **section_values}
        return cls.model_validate(complete)

    @property
    def attention(self) -> AttentionConfig:
        """Options that all attention layers share; `model.attention` and `model.rope_layers` say how they differ."""
        return rules.attention_of(self.model, self.nsa)

    @property
    def window(self) -> int:
        """Window of layers of kind `window`, in tokens."""
        return self.nsa.w if self.model.window is None else self.model.window

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        return rules.enforce(self, rules.check_run(self.attention, self.model.attention))

    @property
    def notices(self) -> tuple[str, ...]:
        """Notes on how this config was resolved, e.g. retired names that were ignored."""
        return self._notices

    def value(self, key: str) -> Any:
        """The value of a dotted key such as `train.lr`."""
        if key not in settings():
            raise ConfigError(f"{key!r} is not a setting. `nsa config show FILE` lists them all.")
        value: Any = self
        for part in key.split("."):
            value = getattr(value, part)
        return value

    def origin(self, key: str) -> str:
        """Origin of a value: file and line, profile, environment variable, command line, or default."""
        value = self.value(key)
        if key in self._origins:
            return self._origins[key]
        *path, name = key.split(".")
        section: ConfigSection = self
        for part in path:
            section = getattr(section, part)
        if key.startswith("nsa.") and name in PRESETS[self.nsa.preset]:
            return f"nsa.preset={self.nsa.preset}"
        is_set = name in section.model_fields_set
        return "code" if is_set and value != settings()[key].default else "default"

    def origins(self) -> dict[str, str]:
        return {key: self.origin(key) for key in settings()}


VALUES_BEFORE = {"nsa.kv": "per_branch", "data.mask_document_ends": False}
"""Behaviour of versions without these settings, where it is not the default."""

# Keys of earlier systems that old configs contain: accepted, ignored, and reported with their replacement.
RETIRED_KEYS = {
    "runtime.use_triton_sel": "the backend of each branch is chosen by kernels.selected and kernels.select",
    "runtime.sel_triton_min_L": "kernels.selected=auto chooses one backend for every length",
    "runtime.fa2_enabled": "flash-attn is not used; kernels.sliding and kernels.compressed choose the backend",
    "runtime.fa2_min_len_win": "kernels.sliding=auto chooses one backend for every length",
    "runtime.fa2_min_len_cmp": "kernels.compressed=auto chooses one backend for every length",
}


@cache
def sections() -> Mapping[str, type[ConfigSection]]:
    """Dotted section name → its class, in the order they are documented, e.g. `model` and `model.rope_scaling`."""
    return types.MappingProxyType(dict(_sections_of(RunConfig)))


def _sections_of(outer: type[ConfigSection], prefix: str = "") -> Iterator[tuple[str, type[ConfigSection]]]:
    for name, field in outer.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, ConfigSection):
            yield f"{prefix}{name}", field.annotation
            yield from _sections_of(field.annotation, f"{prefix}{name}.")


@cache
def settings() -> Mapping[str, FieldInfo]:
    """Dotted key → its field, e.g. `train.lr`, in the order they are documented."""
    fields = dict(RunConfig.model_fields)
    for section, cls in sections().items():
        fields |= {f"{section}.{name}": field for name, field in cls.model_fields.items()}
    return types.MappingProxyType({key: field for key, field in fields.items() if key not in sections()})
