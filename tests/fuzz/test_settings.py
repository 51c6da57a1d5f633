"""Fuzz targets: settings on the command line, in YAML files and in environment variables.

Oracles: the same file without the change, PyYAML's own loader, and the same setting given in another way.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from nsa.errors import ConfigError
from nsa_train.config import load
from nsa_train.config.env import RETIRED, VARIABLES
from nsa_train.config.load import _COMMAND_LINE
from nsa_train.config.model_sections import PRESETS
from nsa_train.config.schema import RETIRED_KEYS, RunConfig, settings
from nsa_train.config.setting_types import choices, plain
from tests.fuzz.campaign import FuzzCampaign
from tests.fuzz.mutations import STRANGE_VALUES, mutated_bytes

ROOT = Path(__file__).parents[2]
SHIPPED = [path.read_bytes() for path in sorted((ROOT / "configs").glob("*.yaml"))]
SMALL = b"train: {steps: 20, warmup_steps: 2}\n"
KEYS = sorted(settings())

TEXTS = [json.dumps(value) if not isinstance(value, str) else value for value in STRANGE_VALUES]
TEXTS += ["yes", "off", "auto", "cpu", "bf16", "4k", "1_0", " 3 ", "0x10", "12:30", "[1, 2", "{}", "a=b", "~",
          "1e-4", "16", "0.1", "['nsa', 'dense']", "[nsa*3, dense]", "$HOME", "*", "s3://b/p", "file:///x", "-0",
          "1." + "0" * 400, "0.1e-400"]  # fmt: skip
setting_texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=20), st.integers().map(str), st.floats().map(str))


def plausible_texts(key: str) -> list[str]:
    """Values near those that the setting may have, so that many cases are accepted."""
    field = settings()[key]
    near = [str(plain(field.default)), *choices(field), "true", "1", "2", "8", "64", "0.5", "null"]
    return [text for text in near if text]


given_settings = st.sampled_from(KEYS).flatmap(
    lambda key: st.tuples(st.just(key), st.one_of(st.sampled_from(plausible_texts(key)), setting_texts))
)


DERIVED = {"train.warmup_steps", "nsa.rope_compressed"}
"""Settings whose default follows from others: the number of steps, φ."""


def values_of(config: RunConfig) -> dict[str, Any]:
    def flat(section: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        values = {}
        for name, value in section.items():
            key = f"{prefix}{name}"
            values |= {key: value} if key in settings() else flat(value, f"{key}.")
        return values

    return flat(config.model_dump(mode="json"))


def test_overrides(fuzz: FuzzCampaign, tmp_path: Path) -> None:
    """An override sets what it names and what is derived from that; of two for one key the later one counts."""
    file = tmp_path / "run.yaml"
    file.write_bytes(SMALL)
    plain = values_of(load(file))
    known = given_settings.map("=".join)
    words = st.one_of(known, known, known, st.builds("{}={}".format, st.text(max_size=8), setting_texts), st.text())

    def check(overrides: list[str]) -> None:
        config = load(file, overrides=overrides)
        words_by_key = {word.partition("=")[0].strip(): word for word in overrides}
        values = values_of(config)
        of_preset = (
            {f"nsa.{key}" for preset in PRESETS.values() for key in preset} if "nsa.preset" in words_by_key else set()
        )
        assert {key for key in values if values[key] != plain[key]} <= words_by_key.keys() | DERIVED | of_preset
        assert values_of(load(file, overrides=list(words_by_key.values()))) == values
        assert all(config.origin(key) == _COMMAND_LINE for key in words_by_key)
        assert values_of(RunConfig.of_saved(config.model_dump(mode="json"))) == values

    fuzz.run(
        st.lists(words, min_size=1, max_size=3), check, examples=1200, good=[["train.lr=0.5"]], read_seed=json.loads
    )


def as_yaml(pair: tuple[str, str]) -> bytes:
    section, _, name = pair[0].rpartition(".")
    line = f"{name}: {pair[1]}"
    for outer in reversed(section.split(".") if section else []):
        line = f"{outer}: {{{line}}}"
    return line.encode("utf-8", "surrogatepass")


NULLS = ("", "~", "null", "Null", "NULL")


def leaves(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def test_config_files(fuzz: FuzzCampaign, tmp_path: Path) -> None:
    """A file that is used holds only known keys; all its values, as PyYAML reads them, change nothing given again."""
    file = tmp_path / "run.yaml"
    encodings = st.sampled_from(("utf-16", "utf-32", "utf-8-sig", "utf-16-be", "cp500"))
    recoded = st.builds(lambda raw, code: raw.decode().encode(code, "replace"), st.sampled_from(SHIPPED), encodings)

    def check(content: bytes) -> None:
        file.write_bytes(content)
        values = values_of(load(file))
        written = dict(leaves(yaml.load(content.decode("utf-8-sig"), Loader=yaml.BaseLoader)))  # scalars as text
        assert all(key in settings() or key in RETIRED_KEYS or text in NULLS for key, text in written.items())
        words = [f"{key}={'null' if text in NULLS else text}" for key, text in written.items() if key in settings()]
        assert values_of(load(file, overrides=[word for word in words if "=[" not in word])) == values

    cases = st.one_of(mutated_bytes(*SHIPPED), mutated_bytes(*SHIPPED), given_settings.map(as_yaml), recoded)
    fuzz.run(cases, check, examples=700, good=SHIPPED)


def test_environment(fuzz: FuzzCampaign, tmp_path: Path) -> None:
    """A variable is worth what the setting is worth on the command line: the same value, or refused by both."""
    file = tmp_path / "run.yaml"
    file.write_bytes(SMALL)
    names = st.one_of(
        st.sampled_from([*VARIABLES, *RETIRED, "CONFIG", "HOME"]), st.text(max_size=6).map("NSA_{}".format)
    )
    texts = setting_texts.filter(lambda text: "\0" not in text)

    def check(environ: dict[str, str]) -> None:
        alone = dict(list(environ.items())[:1])
        ((name, text),) = alone.items()
        variable = VARIABLES.get(name)
        if variable is not None and not variable.negated and text.strip() and text.strip() != "null":
            words = [f"{key}={text.strip()}" for key in variable.keys]
            outcomes = []
            for sources in (dict(environ=alone), dict(overrides=words)):
                try:
                    outcomes.append(values_of(load(file, **sources)))
                except ConfigError:
                    outcomes.append(None)
            assert outcomes[0] == outcomes[1]
        load(file, environ=environ)

    names_and_texts = st.one_of(
        st.tuples(names, texts),
        st.sampled_from([*VARIABLES]).flatmap(
            lambda name: st.tuples(st.just(name), st.sampled_from(plausible_texts(VARIABLES[name].keys[0])))
        ),
    )
    cases = st.lists(names_and_texts, min_size=1, max_size=3).map(dict)
    fuzz.run(cases, check, examples=700, good=[{"NSA_KERNEL": "portable"}], read_seed=json.loads)
