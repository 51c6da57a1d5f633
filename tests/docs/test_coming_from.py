"""docs/COMING_FROM.md: settings and commands of ours exist; so do the arguments of the HF Trainer that it names."""

import re
from dataclasses import fields

import pytest

from nsa_train.config.schema import sections, settings
from tests.docs.blocks import ROOT, unknown_words

TEXT = (ROOT / "docs" / "COMING_FROM.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (.+?) \| (.+) \|$", TEXT, re.MULTILINE)


def test_every_setting_of_ours_exists():
    names = {name for _, ours in ROWS for name in re.findall(r"`((?:\w+\.)+\w+)(?:=\w+)?`", ours)}
    names = {name for name in names if name.split(".")[0] in sections() and name.islower()}
    assert len(names) > 15
    assert names - settings().keys() == set()


def test_every_command_of_ours_exists():
    commands = [words for _, ours in ROWS for words in re.findall(r"`nsa ([^`(]+)`", ours)]
    assert len(commands) > 8
    assert [problem for words in commands if (problem := unknown_words(words.split()))] == []


def test_arguments_of_the_trainer_exist():
    transformers = pytest.importorskip("transformers")
    known = {field.name for field in fields(transformers.TrainingArguments)}
    part = TEXT[TEXT.index("## Hugging Face Trainer") :]
    named = {name for theirs, _ in re.findall(r"^\| (.+?) \| (.+) \|$", part, re.MULTILINE)
             for name in re.findall(r"`([a-z]+(?:_[a-z]+)*)`", theirs)}  # fmt: skip
    named -= {"save_pretrained", "push_to_hub"}  # methods of a model
    assert len(named) > 10
    assert named - known == set()
