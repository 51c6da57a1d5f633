"""A checkpoint exported for Transformers is the same model: weights, logits, tokenizer, settings."""

import json
import os
from pathlib import Path

import pytest
import torch

from nsa.errors import CheckpointError, ConfigError, DataError, NSAError, OutputError
from nsa_train.checkpoint.manifest import LocalFiles
from nsa_train.data.tokenizer import ByteTokenizer, train_bpe

pytest.importorskip("transformers", reason="Transformers is in the hf extra")
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import nsa.hf
from nsa_train.convert.export_folder import export_folder
from tests.trained_runs import files_of, save_run, settings

KEY = b"0123456789abcdef"
VARIANTS = {
    "plain": {},
    "tied": {"model": {"tie_embeddings": True}},
    "biases and norms": {"model": {"qkv_bias": True, "attention_out_bias": True, "qk_norm": True, "d_v": 12}},
    "mlp": {"nsa": {"phi": "mlp", "phi_pos_emb": True, "gate": "sigmoid", "gate_per": "group", "kv": "shared"}},
    "weighted": {"nsa": {"phi": "weighted"}},
    "softmax": {"nsa": {"phi": "softmax", "kv": "shared", "selector_loss": 1.0}},
    "rows to spare": {"model": {"vocab_size": 320}},
    "longer context": {
        "model": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}
    },
}


def tokens(count: int = 100) -> torch.Tensor:
    return torch.randint(0, 256, (2, count), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_exported_model_gives_the_same_logits(variant, tmp_path):
    ours = save_run(tmp_path / "run", settings(**VARIANTS[variant]))
    export_folder(tmp_path / "run", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert type(theirs) is nsa.hf.NSAForCausalLM
    assert theirs.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(theirs(tokens(), use_cache=False).logits, ours(tokens()))
    assert theirs.num_parameters() == ours.num_params()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("module") / "run"
    save_run(folder)
    return folder


@pytest.fixture(scope="module")
def out(run) -> Path:
    export_folder(run, run.parent / "out", license_name="apache-2.0")
    return run.parent / "out"


def test_the_folder_holds_everything_and_no_code(out):
    assert set(files_of(out)) == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "training_record.json",
    }  # fmt: skip
    config = json.loads((out / "config.json").read_text())
    assert "auto_map" not in config
    assert config["architectures"] == ["NSAForCausalLM"]
    # Everything that defines the model is written down, so that a later default changes nothing.
    assert {"l", "d", "l_sel", "n_sel", "w", "phi", "gate", "kv", "rope_theta", "head_dim", "v_head_dim"} <= set(config)
    assert os.stat(out / "model.safetensors").st_mode == os.stat(out / "README.md").st_mode


def test_tokenizer_and_generation_settings_belong_to_the_model(out):
    tokenizer, config = AutoTokenizer.from_pretrained(out), AutoConfig.from_pretrained(out)
    generation = GenerationConfig.from_pretrained(out)
    assert tokenizer("héllo")["input_ids"] == list("héllo".encode())
    assert tokenizer.eos_token_id == config.eos_token_id == generation.eos_token_id == ByteTokenizer.eos_id
    assert generation.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.model_max_length == config.max_position_embeddings == 128


def test_no_path_of_the_machine_is_exported(out, run):
    content = b"".join(data for name, data in files_of(out).items() if not name.endswith(".safetensors"))
    assert b"secret" not in content
    assert str(run).encode() not in content
    assert b"books.jsonl" in content


def test_an_export_is_reproducible_and_read_only_for_the_run(run, out, tmp_path):
    before = LocalFiles(run).files()
    export_folder(run / "checkpoints" / "latest", tmp_path / "again", license_name="apache-2.0")
    assert files_of(tmp_path / "again") == files_of(out)
    assert LocalFiles(run).files() == before


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_weights_in_another_precision(run, name, dtype, tmp_path):
    export_folder(run, tmp_path / "out", dtype=name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == dtype
    full = AutoModelForCausalLM.from_pretrained(run.parent / "out")
    for parameter, exact in zip(model.parameters(), full.parameters(), strict=True):
        assert torch.equal(parameter, exact.to(dtype))


def test_large_weights_are_split_into_files(run, out, tmp_path):
    export_folder(run, tmp_path / "out", shard_bytes=20_000)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 2
    assert not (tmp_path / "out" / "model.safetensors").exists()
    whole = AutoModelForCausalLM.from_pretrained(out)
    split = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), split.parameters(), strict=True))


def test_a_bpe_goes_along(tmp_path):
    bpe = train_bpe(["some words, some more words"] * 9, 280, tmp_path / "bpe.json")
    save_run(tmp_path / "run", tokenizer=bpe)
    (tmp_path / "bpe.json").unlink()
    export_folder(tmp_path / "run", tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("some words")["input_ids"] == list(
        bpe.encode_batch(["some words"])[0]
    )


def test_a_run_without_a_tokenizer_asks_for_it(tmp_path):
    save_run(tmp_path / "run", keep_tokenizer=False)
    with pytest.raises(ConfigError, match="--tokenizer"):
        export_folder(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    export_folder(tmp_path / "run", tmp_path / "out", tokenizer="byte")
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a")["input_ids"] == [97]
    save_run(tmp_path / "synthetic", settings(data={"dataset": "synthetic", "path": None}), keep_tokenizer=False)
    export_folder(tmp_path / "synthetic", tmp_path / "ids")
    assert not (tmp_path / "ids" / "tokenizer.json").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path / "ids")


def test_another_tokenizer_than_the_kept_one_is_refused(tmp_path):
    train_bpe(["some words, some more words"] * 9, 280, tmp_path / "bpe.json")
    save_run(tmp_path / "run")
    with pytest.raises(DataError, match="fingerprint"):
        export_folder(tmp_path / "run", tmp_path / "out", tokenizer=str(tmp_path / "bpe.json"))


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    train_bpe(["some words, some more words"] * 9, 280, tmp_path / "bpe.json")
    save_run(tmp_path / "run", keep_tokenizer=False)
    with pytest.raises(ConfigError, match="ids beyond"):
        export_folder(tmp_path / "run", tmp_path / "out", tokenizer=str(tmp_path / "bpe.json"))


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"license_name": "mine\nlicense: other"}, {"license_name": ""}])
def test_wrong_options_write_nothing(run, options, tmp_path):
    with pytest.raises(ConfigError):
        export_folder(run, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    save_run(tmp_path / "run", step=10)
    save_run(tmp_path / "run", step=20)
    tensors = next((tmp_path / "run/checkpoints/step20/model_and_optim").glob("*.distcp"))
    raw = bytearray(tensors.read_bytes())
    raw[-100] ^= 1
    tensors.write_bytes(raw)
    with pytest.raises(CheckpointError, match="SHA-256"):
        export_folder(tmp_path / "run/checkpoints/step20", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    seen = []
    exported = export_folder(tmp_path / "run", tmp_path / "out", on_rejected=seen.append)
    assert exported.record.step == 10
    assert [finding.name for finding in seen] == ["step20"]


def test_signed_checkpoints_need_their_key(tmp_path):
    save_run(tmp_path / "run", key=KEY)
    with pytest.raises(CheckpointError, match="another key"):
        export_folder(tmp_path / "run/checkpoints/step20", tmp_path / "out", key=KEY[::-1])
    export_folder(tmp_path / "run", tmp_path / "out", key=KEY)
    save_run(tmp_path / "unsigned")
    with pytest.raises(CheckpointError, match="not signed"):
        export_folder(tmp_path / "unsigned/checkpoints/step20", tmp_path / "other", key=KEY)


def test_an_existing_folder_is_replaced_only_on_request_and_only_if_it_is_an_export(run, out, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    export_folder(run, taken)  # an empty folder is free
    with pytest.raises(OutputError, match="--overwrite"):
        export_folder(run, taken)
    export_folder(run, taken, overwrite=True, license_name="apache-2.0")
    assert files_of(taken) == files_of(out)
    (taken / "thesis.tex").write_text("years of work")
    with pytest.raises(OutputError):
        export_folder(run, taken, overwrite=True)
    assert (taken / "thesis.tex").read_text() == "years of work"
    home = tmp_path / "home"
    (home / "documents").mkdir(parents=True)
    (home / "config.json").write_text('{"model_type": "nsa"}')
    with pytest.raises(OutputError):
        export_folder(run, home, overwrite=True)
    (tmp_path / "link").symlink_to(home)
    with pytest.raises(OutputError):
        export_folder(run, tmp_path / "link", overwrite=True)


def test_a_failed_export_leaves_the_former_one_and_no_files(run, tmp_path, monkeypatch):
    export_folder(run, tmp_path / "out")
    before = files_of(tmp_path)

    def fail(*arguments: object) -> None:
        raise OutputError("the disk is full")

    monkeypatch.setattr("nsa_train.convert.export_folder.write_weights", fail)
    with pytest.raises(NSAError, match="full"):
        export_folder(run, tmp_path / "out", overwrite=True)
    assert files_of(tmp_path) == before
