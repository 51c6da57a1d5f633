"""An exported folder is read back exactly, or refused without executing anything in it."""

import json
import os
import pickle
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nsa.errors import CheckpointError, NSAError, OutputError
from nsa_train.checkpoint.load import require_trustworthy
from nsa_train.checkpoint.trained_model import open_trained_model
from nsa_train.data.tokenizer import ByteTokenizer, train_bpe

pytest.importorskip("transformers", reason="Transformers is in the hf extra")
from transformers import AutoConfig, AutoModelForCausalLM

from nsa_train.convert.export_folder import export_folder
from nsa_train.convert.import_folder import import_folder, open_exported
from tests.initial_weights import RAISED, require_raised
from tests.nsa_train.convert.test_export_folder import KEY, VARIANTS
from tests.trained_runs import files_of, save_run, settings


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_export_import_export_gives_identical_bytes(variant, dtype, tmp_path):
    ours = save_run(tmp_path / "run", settings(**VARIANTS[variant]))
    export_folder(tmp_path / "run", tmp_path / "first", dtype=dtype, license_name="mit", shard_bytes=50_000)
    import_folder(tmp_path / "first", tmp_path / "back")
    export_folder(tmp_path / "back", tmp_path / "second", shard_bytes=50_000)
    assert files_of(tmp_path / "second") == files_of(tmp_path / "first")
    if dtype is None:
        tensors = open_trained_model(tmp_path / "back").tensors
        assert tensors.keys() == ours.state_dict().keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in ours.state_dict().items())


@pytest.mark.parametrize("kind", ["byte", "bpe"])
def test_an_imported_run_has_the_tokenizer_and_settings_of_the_first(kind, tmp_path):
    tokenizer = ByteTokenizer() if kind == "byte" else train_bpe(["some words"] * 9, 270, tmp_path / "bpe.json")
    save_run(tmp_path / "run", tokenizer=tokenizer)
    export_folder(tmp_path / "run", tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import_folder(tmp_path / "out", tmp_path / "back", key=KEY)
    first, back = open_trained_model(tmp_path / "run"), open_trained_model(tmp_path / "back", key=KEY)
    assert back.record.step == first.record.step == 20
    saved = back.tokenizer()
    assert saved is not None
    assert saved.fingerprint == tokenizer.fingerprint
    assert back.config.nsa == first.config.nsa
    assert back.config.model.model_dump(exclude={"ffn_dim"}) == first.config.model.model_dump(exclude={"ffn_dim"})
    assert back.config.model.ffn_size == first.config.model.ffn_size
    assert require_trustworthy(back.path, key=KEY).manifest is not None  # signed like any checkpoint


def test_the_initial_standard_deviation_is_kept_and_is_the_default_in_an_older_folder(tmp_path):
    save_run(tmp_path / "run", settings(model={"init_std": RAISED}))
    export_folder(tmp_path / "run", tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values.pop("initializer_range") == RAISED
    shutil.copytree(tmp_path / "out", tmp_path / "older")
    (tmp_path / "older" / "config.json").write_text(json.dumps(values))
    started = {}
    for name, std in (("out", RAISED), ("older", 0.02)):
        import_folder(tmp_path / name, tmp_path / f"from_{name}")
        assert open_trained_model(tmp_path / f"from_{name}").config.model.init_std == std
        torch.manual_seed(1)
        started[name] = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / name))
    require_raised(started["older"], started["out"])


def test_a_folder_that_transformers_saved_is_imported(tmp_path):
    save_run(tmp_path / "run")
    export_folder(tmp_path / "run", tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(tmp_path / "tuned")
    import_folder(tmp_path / "tuned", tmp_path / "back")
    back = open_trained_model(tmp_path / "back")
    assert torch.equal(back.tensors["lm_head.w_out.weight"], model.lm_head.weight)
    assert back.tokenizer() is None
    assert back.record.step == 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    save_run(folder / "run")
    export_folder(folder / "run", folder / "out")
    export_folder(folder / "run", folder / "split", shard_bytes=20_000)
    return folder


def test_an_existing_folder_is_not_written_into(whole, tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").write_text("")
    with pytest.raises(OutputError):
        import_folder(whole / "out", tmp_path / "taken")
    assert files_of(tmp_path / "taken") == {"file": b""}


def json_change(name: str, **changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **changes}))

    return change


def text(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content)


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        held = load_file(folder / "model.safetensors")
        change(held)
        save_file(held, folder / "model.safetensors", metadata={"format": "pt"})

    return write


def header(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        raw = (folder / "model.safetensors").read_bytes()
        length = struct.unpack("<Q", raw[:8])[0]
        new = change(raw[8 : 8 + length])
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(new)) + new + raw[8 + length :])

    return write


def with_offsets(raw: bytes, begin: int) -> bytes:
    described = json.loads(raw)
    first, end = described[W_Q]["data_offsets"]
    described[W_Q]["data_offsets"] = [begin, begin + end - first]
    return json.dumps(described).encode()


def linked(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        os.rename(folder / name, folder.parent / "elsewhere")
        (folder / name).symlink_to(folder.parent / "elsewhere")

    return write


def pipe(name: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return write


class Boom:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {TOUCHED}",)


TOUCHED = "/tmp/nsa_test_import_executed"


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Boom()))


W_Q = "model.layers.0.attention.w_q.weight"
DEEP = '{"a":' * 50_000
INDEX = "model.safetensors.index.json"
WHOLE_CASES = {
    "no config": lambda folder: (folder / "config.json").unlink(),
    "config is a list": text("config.json", "[]"),
    "config is deep": text("config.json", DEEP),
    "config gives a key twice": text("config.json", '{"model_type": "llama", "model_type": "nsa"}'),
    "config of another model": json_change("config.json", model_type="llama"),
    "another architecture": json_change("config.json", architectures=["os.system"]),
    "width is NaN": text("config.json", '{"model_type": "nsa", "hidden_size": NaN}'),
    "width is infinite": text("config.json", '{"model_type": "nsa", "rope_theta": 1e999}'),
    "width is text": json_change("config.json", hidden_size="32"),
    "width is true": json_change("config.json", hidden_size=True),
    "width is negative": json_change("config.json", hidden_size=-32),
    "width is zero": json_change("config.json", hidden_size=0),
    "width is huge": json_change("config.json", hidden_size=2**62),
    "width of gigabytes": json_change("config.json", hidden_size=2**30),
    "a billion layers": json_change("config.json", num_hidden_layers=10**9),
    "no layers": json_change("config.json", num_hidden_layers=0),
    "heads do not divide": json_change("config.json", num_attention_heads=3),
    "block sizes break a rule": json_change("config.json", d=5),
    "a list for a number": json_change("config.json", w=[24]),
    "unknown option": json_change("config.json", phi="__import__('os')"),
    "rope scaling of another kind": json_change("config.json", rope_scaling={"rope_type": "exec"}),
    "rope scaling is text": json_change("config.json", rope_scaling="yarn"),
    "another vocabulary": json_change("config.json", vocab_size=100),
    "another end of text": json_change("config.json", eos_token_id=5),
    "tied, but two tensors": json_change("config.json", tie_word_embeddings=True),
    "two epsilons": json_change("config.json", qk_norm=True, qk_norm_eps=0.5),
    "weights are a pickle": only_pickle,
    "weights are not safetensors": text("model.safetensors", "PK\x03\x04" * 100),
    "weights are empty": text("model.safetensors", ""),
    "weights are cut off": lambda folder: os.truncate(folder / "model.safetensors", 5000),
    "weights are a link": linked("model.safetensors"),
    "config is a link": linked("config.json"),
    "weights are a pipe": pipe("model.safetensors"),
    "config is a pipe": pipe("config.json"),
    "config is huge": lambda folder: os.truncate(folder / "config.json", 1 << 40),
    "header is huge": header(lambda raw: raw + b" " * (33 << 20)),
    "header length is a lie": lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 4096),
    "header is deep": header(lambda raw: b"[" * 100_000),
    "header overlaps": header(lambda raw: with_offsets(raw, 0)),
    "header leads beyond the file": header(lambda raw: with_offsets(raw, 1 << 40)),
    "header leads before the file": header(lambda raw: with_offsets(raw, -(1 << 20))),
    "a tensor is missing": tensors(lambda held: held.pop(W_Q)),
    "a tensor too many": tensors(lambda held: held.update(extra=torch.zeros(3))),
    "a tensor of another model": tensors(lambda held: held.update({"model.layers.0.mlp.weight": held.pop(W_Q)})),
    "another shape": tensors(lambda held: held.update({W_Q: held[W_Q].T.contiguous()[:, :8].clone()})),
    "as many values, another shape": tensors(lambda held: held.update({W_Q: held[W_Q].reshape(-1)})),
    "whole numbers": tensors(lambda held: held.update({W_Q: held[W_Q].to(torch.int32)})),
    "record is a list": text("training_record.json", "[]"),
    "record of the future": json_change("training_record.json", format=2),
    "record with more": json_change("training_record.json", command="rm"),
    "record of a negative step": json_change("training_record.json", step=-1),
    "record of a huge step": json_change("training_record.json", step=2**80),
    "record of control characters": json_change("training_record.json", data="\x1b[2J"),
    "record with a false licence": json_change("training_record.json", license="x\nlicense: y"),
    "record of unknown settings": json_change("training_record.json", settings={"shell": {"command": "rm"}}),
    "record of wrong settings": json_change("training_record.json", settings={"train": {"lr": "fast"}}),
    "record of deep settings": json_change("training_record.json", settings={"train": {"lr": [[[[[[]]]]]]}}),
    "record is a link": linked("training_record.json"),
    "tokenizer of another vocabulary": lambda folder: train_bpe(["ab"] * 9, 260, folder / "tokenizer.json"),
    "tokenizer is a link": linked("tokenizer.json"),
    "tokenizer config is missing": lambda folder: (folder / "tokenizer_config.json").unlink(),
}
SPLIT_CASES = {
    "index leads outside": lambda folder: rename_shard(folder, "../elsewhere.safetensors"),
    "index leads to a path": lambda folder: rename_shard(folder, "/etc/passwd"),
    "index leads to a subfolder": lambda folder: rename_shard(folder, "sub/model-00001-of-00009.safetensors"),
    "index names a file that is not there": lambda folder: rename_shard(folder, "model-00099-of-00099.safetensors"),
    "index names a number": lambda folder: rename_shard(folder, 7),
    "index is a list": text(INDEX, "[]"),
    "index is deep": text(INDEX, DEEP),
    "index has no map": text(INDEX, "{}"),
    "index has an empty map": text(INDEX, '{"weight_map": {}}'),
    "index has a map of lists": text(INDEX, '{"weight_map": [["a", "b"]]}'),
    "index is a link": linked(INDEX),
    "a file is a link": lambda folder: linked(min(path.name for path in folder.glob("model-*")))(folder),
    "index says another file": lambda folder: exchange_shards(folder),
}


def rename_shard(folder: Path, name: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][W_Q] = name
    (folder / INDEX).write_text(json.dumps(index))


def exchange_shards(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    other = next(name for name in index["weight_map"].values() if name != index["weight_map"][W_Q])
    rename_shard(folder, other)


@pytest.mark.parametrize(
    ("source", "case"), [*(("out", case) for case in WHOLE_CASES), *(("split", case) for case in SPLIT_CASES)]
)
def test_a_hostile_folder_is_refused(whole, source, case, tmp_path):
    folder = Path(shutil.copytree(whole / source, tmp_path / "given"))
    {**WHOLE_CASES, **SPLIT_CASES}[case](folder)
    with pytest.raises(NSAError) as refused:
        import_folder(folder, tmp_path / "back")
    assert str(refused.value)
    assert not (tmp_path / "back").exists()
    assert not os.path.exists(TOUCHED)


def test_code_pickles_and_auto_map_are_ignored(whole, tmp_path):
    folder = Path(shutil.copytree(whole / "out", tmp_path / "given"))
    json_change("config.json", auto_map={"AutoConfig": "evil.NSAConfig", "AutoModelForCausalLM": "evil.Model"})(folder)
    (folder / "evil.py").write_text(f"import os; os.system('touch {TOUCHED}')")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Boom()))
    (folder / "custom_generate").mkdir()
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    import_folder(folder, tmp_path / "back")
    assert not os.path.exists(TOUCHED)
    export_folder(tmp_path / "back", tmp_path / "again")
    assert files_of(tmp_path / "again") == files_of(whole / "out")


def test_not_a_folder_and_not_an_export_are_refused(tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(CheckpointError):
            open_exported(path)
