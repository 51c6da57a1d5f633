"""Conversion and the way back keep every tensor bit for bit; a folder that is not as its config says is refused."""

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nsa.errors import CheckpointError, ConfigError, OutputError
from nsa_train.data.tokenizer import train_bpe

pytest.importorskip("transformers", reason="Transformers is in the hf extra")
from transformers import AutoModelForCausalLM

from nsa_train.convert.dense.conversion_plan import ConversionOptions
from nsa_train.convert.dense.convert_folder import CONVERSION, convert_folder, export_dense
from nsa_train.convert.export_folder import export_folder
from nsa_train.convert.import_folder import import_folder, open_exported
from nsa_train.convert.tokenizer_files import tokenizer_files
from nsa_train.infer.load_model import load_model
from tests.nsa_train.convert.dense_sources import CASES, SIZES, save_dense
from tests.nsa_train.convert.test_import_folder import (
    DEEP,
    TOUCHED,
    Boom,
    header,
    json_change,
    linked,
    pipe,
    tensors,
    text,
)
from tests.trained_runs import files_of

OPTIONS = ConversionOptions(l=8, d=4, l_sel=16, n_sel=4, w=24)
Q = "model.layers.0.self_attn.q_proj.weight"
INDEX = "model.safetensors.index.json"


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def same_tensors(first: Path, second: Path) -> bool:
    one, two = all_tensors(first), all_tensors(second)
    return one.keys() == two.keys() and all(
        one[name].dtype == two[name].dtype and torch.equal(one[name], two[name]) for name in one
    )


@pytest.mark.parametrize("case", CASES)
def test_a_round_trip_is_bit_exact(case, tmp_path):
    save_dense(tmp_path / "dense", case, dtype=torch.bfloat16)
    mix = "gated" if len(case) % 2 else "merged"
    convert_folder(tmp_path / "dense", tmp_path / "sparse", ConversionOptions(mix=mix, phi="weighted", l=8, d=4))
    back = export_dense(tmp_path / "sparse", tmp_path / "back")
    assert back.unchanged == back.tensors
    assert bool(back.dropped) == (case != "mistral sliding")
    assert same_tensors(tmp_path / "dense", tmp_path / "back")
    assert (tmp_path / "back/config.json").read_bytes() == (tmp_path / "dense/config.json").read_bytes()
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")


def test_sharded_sources_and_results(tmp_path):
    save_dense(tmp_path / "dense", "phi3", shard="50KB")
    assert len(list((tmp_path / "dense").glob("model-*.safetensors"))) > 2
    convert_folder(tmp_path / "dense", tmp_path / "sparse", OPTIONS, shard_bytes=50_000)
    assert len(list((tmp_path / "sparse").glob("model-*.safetensors"))) > 2
    export_dense(tmp_path / "sparse", tmp_path / "back", shard_bytes=50_000)
    assert same_tensors(tmp_path / "dense", tmp_path / "back")


def test_a_second_copy_of_tied_embeddings_is_kept_if_it_is_one(tmp_path):
    save_dense(tmp_path / "dense", "llama tied")
    assert "lm_head.weight" not in all_tensors(tmp_path / "dense")
    embedding = "model.embed_tokens.weight"
    tensors(lambda held: held.update({"lm_head.weight": held[embedding].clone()}))(tmp_path / "dense")
    convert_folder(tmp_path / "dense", tmp_path / "sparse", OPTIONS)
    export_dense(tmp_path / "sparse", tmp_path / "back")
    assert same_tensors(tmp_path / "dense", tmp_path / "back")
    tensors(lambda held: held.update({"lm_head.weight": held[embedding] + 1}))(tmp_path / "dense")
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        convert_folder(tmp_path / "dense", tmp_path / "other", OPTIONS)


def test_a_trained_model_goes_back_with_its_weights(tmp_path):
    save_dense(tmp_path / "dense", "olmo3", vocab_size=300)
    gated = ConversionOptions(mix="gated", phi="weighted", l=8, d=4, l_sel=16, n_sel=4, w=24)
    convert_folder(tmp_path / "dense", tmp_path / "sparse", gated)
    import_folder(tmp_path / "sparse", tmp_path / "run")
    export_folder(tmp_path / "run", tmp_path / "trained", tokenizer="byte")
    tensors(lambda held: held["model.norm.weight"].add_(1))(tmp_path / "trained")
    with pytest.raises(CheckpointError, match="--like"):
        export_dense(tmp_path / "trained", tmp_path / "back")
    back = export_dense(tmp_path / "trained", tmp_path / "back", like=tmp_path / "sparse")
    assert back.unchanged == back.tensors - 1
    assert back.dropped == {
        "attention.gates.proj.bias": 1,
        "attention.gates.proj.weight": 1,
        "attention.phi_k.w_place": 1,
        "attention.phi_v.w_place": 1,
    }
    before, after = all_tensors(tmp_path / "dense"), all_tensors(tmp_path / "back")
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"] + 1)


def test_a_record_of_another_model_is_refused(tmp_path):
    save_dense(tmp_path / "dense", "llama")
    save_dense(tmp_path / "other", "llama linear")
    for name in ("dense", "other"):
        convert_folder(tmp_path / name, tmp_path / f"{name}-sparse", OPTIONS)
    with pytest.raises(CheckpointError, match="rope_scaling"):
        export_dense(tmp_path / "dense-sparse", tmp_path / "back", like=tmp_path / "other-sparse")
    assert not (tmp_path / "back").exists()


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dense")
    save_dense(folder / "whole")
    save_dense(folder / "split", shard="50KB")
    return folder


def test_the_result_is_an_export_like_any_other(dense, tmp_path):
    conversion = convert_folder(dense / "whole", tmp_path / "sparse", OPTIONS)
    exported = open_exported(tmp_path / "sparse")
    assert exported.config.attention == "merged"
    assert exported.config.rope_angles == "fp32"
    assert conversion.parameters == sum(tensor.numel() for tensor in exported.tensors.values())
    assert "88 tokens" in (tmp_path / "sparse/README.md").read_text()
    record = json.loads((tmp_path / "sparse" / CONVERSION).read_text())
    assert record["architecture"] == "LlamaForCausalLM"
    assert record["config"] == (dense / "whole/config.json").read_text()
    assert record["options"]["n_sel"] == 4
    with pytest.raises(OutputError, match="--overwrite"):
        convert_folder(dense / "whole", tmp_path / "sparse", OPTIONS)
    convert_folder(dense / "whole", tmp_path / "sparse", OPTIONS, overwrite=True)
    export_dense(tmp_path / "sparse", tmp_path / "back")
    export_dense(tmp_path / "sparse", tmp_path / "back", overwrite=True)
    with pytest.raises(CheckpointError, match="--to-dense"):
        convert_folder(tmp_path / "sparse", tmp_path / "again", OPTIONS)


def with_tokenizer(folder: Path, vocab_size: int) -> None:
    """A dense model whose folder has a tokenizer of more than 259 ids and a chat template."""
    save_dense(folder, vocab_size=vocab_size)
    bpe = train_bpe(["some words, some more words"] * 9, 280, folder / "tokenizer.json")
    for name, content in tokenizer_files(bpe, 64).items():
        (folder / name).write_text(content)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "LICENSE").write_text("free")


def test_a_tokenizer_that_can_be_read_goes_along_as_it_is(tmp_path):
    with_tokenizer(tmp_path / "dense", 300)
    conversion = convert_folder(tmp_path / "dense", tmp_path / "sparse", OPTIONS)
    assert conversion.tokenizer_problem is None
    loaded = load_model(tmp_path / "sparse")
    end = loaded.tokenizer.eos_token_id
    assert loaded.end_ids == {SIZES["eos_token_id"], end}
    assert loaded.encode(["some words"]) == [loaded.tokenizer("some words")["input_ids"]]
    assert loaded.encode_chat([{"role": "user", "content": "some words"}]) == loaded.encode(["some words"])[0]
    export_dense(tmp_path / "sparse", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "dense")


def test_a_tokenizer_that_cannot_be_read_is_data(tmp_path):
    with_tokenizer(tmp_path / "dense", 259)
    conversion = convert_folder(tmp_path / "dense", tmp_path / "sparse", OPTIONS)
    assert conversion.tokenizer_problem is not None
    assert "ids" in conversion.tokenizer_problem
    load_model(tmp_path / "sparse", needs_text=False)
    convert_folder(tmp_path / "dense", tmp_path / "sparse", OPTIONS, overwrite=True)
    export_dense(tmp_path / "sparse", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "dense")


def only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Boom()))


def poisoned(value: float) -> object:
    def change(held: dict[str, torch.Tensor]) -> None:
        held[Q][3, 5] = value

    return tensors(change)


def config(**changes: object) -> object:
    return json_change("config.json", **changes)


WHOLE_CASES = {
    "no config": lambda folder: (folder / "config.json").unlink(),
    "config is a list": text("config.json", "[]"),
    "config is deep": text("config.json", DEEP),
    "config is a link": linked("config.json"),
    "config is a pipe": pipe("config.json"),
    "no architecture": config(architectures=None),
    "two architectures": config(architectures=["LlamaForCausalLM", "Qwen2ForCausalLM"]),
    "an unknown architecture": config(architectures=["os.system"]),
    "a mixture of experts": config(architectures=["MixtralForCausalLM"], model_type="mixtral"),
    "scores with a cap": config(architectures=["Gemma2ForCausalLM"], model_type="gemma2"),
    "attention sinks": config(architectures=["GptOssForCausalLM"], model_type="gpt_oss"),
    "another model type": config(model_type="qwen2"),
    "quantised": config(quantization_config={"quant_method": "gptq", "bits": 4}),
    "a cap on scores": config(attn_logit_softcapping=50.0),
    "a scale of attention": config(attention_multiplier=0.02),
    "layers of their own kind": config(layer_types=["sliding_attention"] * 4),
    "another activation": config(hidden_act="gelu"),
    "dynamic RoPE": config(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
    "longrope": config(
        rope_parameters={
            **{"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
            **{"factor": 4.0, "original_max_position_embeddings": 64},
        }
    ),
    "proportional RoPE": config(rope_parameters={"rope_type": "proportional", "factor": 2.0, "rope_theta": 1e4}),
    "partial RoPE": config(rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
    "unknown RoPE": config(rope_parameters={"rope_type": "exec", "rope_theta": 1e4}),
    "RoPE is a list": config(rope_parameters=["yarn"]),
    "RoPE is text": config(rope_parameters={"rope_type": "linear", "factor": "2", "rope_theta": 1e4}),
    "width is text": config(hidden_size="48"),
    "width is zero": config(hidden_size=0),
    "width is huge": config(hidden_size=2**62),
    "width of gigabytes": config(hidden_size=2**30),
    "no heads": config(num_attention_heads=0),
    "heads do not divide": config(num_key_value_heads=3),
    "a billion layers": config(num_hidden_layers=10**9),
    "thousands of layers": config(num_hidden_layers=9_999),
    "no layers": config(num_hidden_layers=0),
    "another vocabulary": config(vocab_size=100),
    "biases that are not there": config(attention_bias=True),
    "tied, but another head": config(tie_word_embeddings=True),
    "weights are a pickle": only_pickle,
    "weights are not safetensors": text("model.safetensors", "PK\x03\x04" * 100),
    "weights are empty": text("model.safetensors", ""),
    "weights are cut off": lambda folder: os.truncate(folder / "model.safetensors", 5000),
    "weights are a link": linked("model.safetensors"),
    "weights are a pipe": pipe("model.safetensors"),
    "header is huge": header(lambda raw: raw + b" " * (33 << 20)),
    "header length is a lie": lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 4096),
    "a tensor is missing": tensors(lambda held: held.pop(Q)),
    "a tensor too many": tensors(lambda held: held.update(extra=torch.zeros(3))),
    "inverse frequencies": tensors(
        lambda held: held.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)})
    ),
    "another shape": tensors(lambda held: held.update({Q: held[Q][:, :8].clone()})),
    "as many values, another shape": tensors(lambda held: held.update({Q: held[Q].reshape(-1)})),
    "whole numbers": tensors(lambda held: held.update({Q: held[Q].to(torch.int32)})),
    "8 bits": tensors(lambda held: held.update({Q: held[Q].to(torch.float8_e4m3fn)})),
    "two types": tensors(lambda held: held.update({Q: held[Q].half()})),
    "NaN": poisoned(float("nan")),
    "infinite": poisoned(float("inf")),
    "tokenizer is a link": lambda folder: (folder / "tokenizer.json").symlink_to("/etc/passwd"),
    "licence is a link": lambda folder: (folder / "LICENSE").symlink_to("/etc/passwd"),
    "generation config is a list": text("generation_config.json", "[]"),
}
SPLIT_CASES = {
    "index leads outside": lambda folder: name_shard(folder, "../elsewhere.safetensors"),
    "index leads to a path": lambda folder: name_shard(folder, "/etc/passwd"),
    "index leads to a subfolder": lambda folder: name_shard(folder, "sub/model-00001-of-00009.safetensors"),
    "index names a file that is not there": lambda folder: name_shard(folder, "model-00099-of-00099.safetensors"),
    "index is a list": text(INDEX, "[]"),
    "index is a link": linked(INDEX),
    "a file is a link": lambda folder: linked(min(path.name for path in folder.glob("model-*")))(folder),
}


def name_shard(folder: Path, name: str) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][Q] = name
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("source", "case"), [*(("whole", case) for case in WHOLE_CASES), *(("split", case) for case in SPLIT_CASES)]
)
def test_a_hostile_or_unknown_folder_is_refused(dense, source, case, tmp_path):
    folder = Path(shutil.copytree(dense / source, tmp_path / "given"))
    {**WHOLE_CASES, **SPLIT_CASES}[case](folder)
    with pytest.raises(CheckpointError) as refused:
        convert_folder(folder, tmp_path / "out", OPTIONS)
    assert str(refused.value)
    assert not (tmp_path / "out").exists()
    assert not os.path.exists(TOUCHED)
    if case in ("NaN", "infinite", "a tensor is missing", "another shape", "8 bits"):
        assert Q in str(refused.value)


def test_code_pickles_and_auto_map_are_ignored(dense, tmp_path):
    folder = Path(shutil.copytree(dense / "whole", tmp_path / "given"))
    config(auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})(folder)
    (folder / "evil.py").write_text(f"import os; os.system('touch {TOUCHED}')")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Boom()))
    convert_folder(folder, tmp_path / "sparse", OPTIONS)
    assert not os.path.exists(TOUCHED)
    assert not (tmp_path / "sparse/evil.py").exists()
    assert same_tensors(dense / "whole", export_back(tmp_path))


def export_back(folder: Path) -> Path:
    export_dense(folder / "sparse", folder / "back")
    return folder / "back"


RECORDS = {
    "no record": lambda folder: (folder / CONVERSION).unlink(),
    "a list": text(CONVERSION, "[]"),
    "of the future": json_change(CONVERSION, format=2),
    "a command": json_change(CONVERSION, command="rm"),
    "without hashes": json_change(CONVERSION, tensors={Q: "abc"}),
    "another config": json_change(CONVERSION, config='{"architectures": ["os.system"]}'),
    "a path": json_change(CONVERSION, files={"../../evil": "README.md"}),
    "a path here": json_change(CONVERSION, files={"LICENSE": "../../secret"}),
    "a link": linked(CONVERSION),
}


@pytest.mark.parametrize("case", RECORDS)
def test_a_hostile_record_is_refused(dense, case, tmp_path):
    convert_folder(dense / "whole", tmp_path / "sparse", OPTIONS)
    RECORDS[case](tmp_path / "sparse")
    with pytest.raises(CheckpointError):
        export_dense(tmp_path / "sparse", tmp_path / "back")
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"mix": "softmax"},
        {"phi": "mlp"},
        {"d": 5},
        {"n_sel": 2},
        {"keep_dense": (4,)},
        {"keep_dense": (-1,)},
        {"keep_dense": (1,), "keep_window": (1,)},
    ],
)
def test_wrong_options_write_nothing(dense, options, tmp_path):
    with pytest.raises(ConfigError):
        convert_folder(dense / "whole", tmp_path / "out", ConversionOptions(**options))
    assert list(tmp_path.iterdir()) == []


def test_layers_with_different_bases_are_refused(tmp_path):
    save_dense(tmp_path / "dense", "olmo3", rope_theta=1000.0)  # Transformers leaves the sliding layers at 500,000
    with pytest.raises(CheckpointError, match="two kinds of RoPE"):
        convert_folder(tmp_path / "dense", tmp_path / "out", OPTIONS)


def test_a_layer_that_slides_in_the_source_cannot_stay_dense(tmp_path):
    save_dense(tmp_path / "dense", "olmo3")
    with pytest.raises(ConfigError, match="slides"):
        convert_folder(tmp_path / "dense", tmp_path / "out", ConversionOptions(keep_dense=(0,)))
