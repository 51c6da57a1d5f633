"""`nsa convert`: what it prints, there and back, and which options go together."""

import json

import pytest
from typer.testing import CliRunner

from nsa.errors import ConfigError
from nsa_train.cli.main import app

pytest.importorskip("transformers", reason="Transformers is in the hf extra")
from tests.nsa_train.convert.dense_sources import save_dense

SIZES = ("--l", "8", "--d", "4", "--l-sel", "16", "--n-sel", "4", "--window", "24")


def call(*words: object) -> str:
    result = CliRunner().invoke(app, ["convert", *map(str, words)])
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense") / "source"
    save_dense(folder)
    return folder


def test_the_output_says_how_far_it_is_exact_and_what_a_late_token_reads(dense, tmp_path):
    printed = call(dense, tmp_path / "sparse", *SIZES, "--keep-dense", "0,3")
    assert "2 dense, 2 merged" in printed
    assert "up to 88 tokens" in printed
    assert "token 256 reads 80 of 256 keys" in printed
    assert "tokenizer" in printed  # the source has none
    back = call(tmp_path / "sparse", tmp_path / "back", "--to-dense")
    assert "bit for bit" in back


def test_json(dense, tmp_path):
    summary = json.loads(call(dense, tmp_path / "sparse", *SIZES, "--mix", "gated", "--phi", "weighted", "--json"))
    assert summary["covered_tokens"] == 64
    assert summary["layers"]["nsa"]["layers"] == 4
    assert summary["new_parameters"] > 0
    back = json.loads(call(tmp_path / "sparse", tmp_path / "back", "--to-dense", "--json"))
    assert back["unchanged"] == back["tensors"]
    assert back["dropped"]["attention.gates.proj.weight"] == 4


@pytest.mark.parametrize(
    "words",
    [
        ("--keep-dense", "first"),
        ("--keep-dense", "9"),
        ("--to-dense", "--mix", "gated"),
        ("--like", "somewhere"),
        ("--mix", "softmax"),
        ("--n-sel", "1"),
    ],
)
def test_options_that_do_not_fit_write_nothing(dense, words, tmp_path):
    with pytest.raises(ConfigError):
        call(dense, tmp_path / "out", *words)
    assert not (tmp_path / "out").exists()
