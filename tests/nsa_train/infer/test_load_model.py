"""A model is loaded from a run, a checkpoint or an exported folder, verified first, with the tokenizer it was trained
with; everything else is refused with what to do.

A dense model of Transformers is loaded as it is: the logits of Transformers, for every kind of layer it has.
"""

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

import nsa_train.infer
from nsa.errors import CheckpointError, ConfigError, DataError
from nsa_train.checkpoint.load import export as export_weights
from nsa_train.checkpoint.manifest import read_key
from nsa_train.checkpoint.trained_model import open_trained_model
from nsa_train.convert.dense.conversion_plan import ConversionOptions
from nsa_train.convert.dense.convert_folder import convert_folder
from nsa_train.convert.export_folder import export_folder
from nsa_train.data.tokenizer import ByteTokenizer, train_bpe
from nsa_train.infer import load_model
from nsa_train.infer.load_model import _is_source, load_reference
from nsa_train.run_model import build_model
from tests.nsa_train.convert.dense_sources import save_dense, token_ids
from tests.trained_runs import write_run

PROMPT = "The quick brown fox jumps over the lazy dog"
FIXTURES = Path(__file__).parents[1] / "checkpoint" / "fixtures"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"), steps=(10, 20))


def greedy(path, **options) -> str:
    return load_model(path, device="cpu", **options).generate(PROMPT, temperature=0, max_new_tokens=20)


def test_three_lines_of_python(run):
    m = nsa_train.infer.load_model(run)
    text = m.generate("Once", max_new_tokens=5)
    assert isinstance(text, str)
    assert m.source.step == 20


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_trained_model(tmp_path, tied):
    folder = write_run(tmp_path, tie_embeddings=tied)
    trained = open_trained_model(folder)
    model = build_model(trained.config, trained.vocab_size)
    model.load_state_dict(trained.tensors)
    loaded = load_model(folder, device="cpu")
    ids = torch.tensor(loaded.encode([PROMPT * 3]))
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids, use_cache=False).logits, model(ids), rtol=0, atol=0)
    assert (loaded.model.lm_head.weight is loaded.model.model.embed_tokens.weight) == tied
    assert not loaded.model.training


def test_run_checkpoint_link_weights_file_and_export_give_the_same_text(run, tmp_path):
    export_folder(run, tmp_path / "exported")
    finished = tmp_path / "finished"
    export_weights(run / "checkpoints" / "step20", finished)
    shutil.copy(run / "checkpoints" / "step20" / "tokenizer.json", finished)
    expected = greedy(run)
    checkpoints = run / "checkpoints"
    for path in (checkpoints, checkpoints / "latest", checkpoints / "step20", tmp_path / "exported", finished):
        assert greedy(path) == expected, path
    assert greedy(checkpoints / "step10") != expected
    assert load_model(tmp_path / "exported").source.step == 20
    assert load_model(finished).source == nsa_train.infer.ModelSource(finished / "model.safetensors", 20)


def test_the_newest_good_checkpoint_is_used_and_rejected_ones_are_told(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run", symlinks=True))
    damaged = next((copy / "checkpoints" / "step20" / "model_and_optim").glob("*.distcp"))
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    told: list[object] = []
    assert load_model(copy, on_rejected=told.append).source.step == 10
    assert len(told) == 1
    with pytest.raises(CheckpointError):
        load_model(copy / "checkpoints" / "step20")


def test_only_signed_checkpoints_are_loaded_with_a_key(tmp_path, run):
    (tmp_path / "key").write_text("k" * 40)
    key = read_key(tmp_path / "key")
    signed = write_run(tmp_path / "signed", key=key)
    assert load_model(signed, key=key).source.step == 10
    with pytest.raises(CheckpointError):
        load_model(run, key=key)


def test_dtype_and_device(run):
    assert load_model(run, dtype="bf16", device="cpu").model.dtype == torch.bfloat16
    assert load_model(run, dtype=torch.float32).model.dtype == torch.float32
    with pytest.raises(ConfigError, match="fp32, bf16, fp16"):
        load_model(run, dtype="int3")


def test_settings_of_the_run_reach_generation(run):
    loaded = load_model(run, device="cpu")
    assert (loaded.prefill_chunk, loaded.trained_length) == (48, 64)
    assert loaded.end_ids == {256}


def test_spelled_special_tokens_are_text_and_an_empty_prompt_begins_a_document(run):
    loaded = load_model(run, device="cpu")
    assert loaded.encode(["<|endoftext|>", ""]) == [list(b"<|endoftext|>"), [256]]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bpe") / "bpe.json"
    train_bpe([PROMPT] * 3, 280, path)
    return path


def test_a_checkpoint_without_its_tokenizer_needs_one_and_checks_its_size(tmp_path, bpe):
    folder = write_run(tmp_path / "run", keep_tokenizer=False)
    with pytest.raises(CheckpointError, match="--tokenizer"):
        load_model(folder)
    assert greedy(folder, tokenizer="byte") == greedy(write_run(tmp_path / "other"))
    with pytest.raises(CheckpointError, match="280 ids"):
        load_model(folder, tokenizer=bpe)


def test_another_tokenizer_than_the_kept_one_is_refused(run, bpe):
    assert len(load_model(run, tokenizer="byte").tokenizer) == 257
    with pytest.raises(DataError, match="fingerprint"):
        load_model(run, tokenizer=bpe)


def test_a_run_of_an_earlier_version_is_loaded_with_its_tokenizer_named(tmp_path):
    with tarfile.open(FIXTURES / "run_e78e5fe.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    assert load_model(tmp_path / "run", tokenizer="byte").source.step == 4


@pytest.mark.parametrize("damage", ["missing", "empty", "file", "truncated", "no_settings", "pickle"])
def test_what_is_no_model_is_refused(run, tmp_path, damage):
    path = tmp_path / "model"
    if damage != "missing":
        path.mkdir()
    if damage == "file":
        path = tmp_path / "file"
        path.write_text("text")
    elif damage == "truncated":
        (path / "model.safetensors").write_bytes(b"\x08\x00\x00")
    elif damage == "no_settings":
        from safetensors.torch import save_file

        save_file({"embeddings.weight": torch.zeros(2, 2)}, path / "model.safetensors")
    elif damage == "pickle":
        (path / "model.pt").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    with pytest.raises(CheckpointError):
        load_model(path)
    assert not Path("pwned").exists()


def test_weights_of_another_model_are_refused(tmp_path):
    """model.safetensors whose settings say three layers and that holds two."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "finished"
    export_weights(write_run(tmp_path / "run") / "checkpoints" / "step10", folder)
    config = open_trained_model(tmp_path / "run").config.model_dump(mode="json")
    config["model"]["n_layers"] = 3
    weights = load_file(folder / "model.safetensors")
    save_file(weights, folder / "model.safetensors", metadata={"config": json.dumps(config), "step": "1"})
    with pytest.raises(CheckpointError, match="weights that its settings describe"):
        load_model(folder, tokenizer="byte")


def test_the_chat_template_of_an_exported_folder_is_used(run, tmp_path):
    export_folder(run, tmp_path / "exported")
    assert load_model(tmp_path / "exported").tokenizer.chat_template is None
    (tmp_path / "exported" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>{% endfor %}assistant:"
    )
    loaded = load_model(tmp_path / "exported")
    assert loaded.encode_chat([{"role": "user", "content": "hi"}]) == [*b"user: hi", 256, *b"assistant:"]


def test_neither_the_training_engine_nor_pickle_is_used(run):
    code = (
        "import sys, pickle, torch; sys.modules['olmo_core'] = None; import nsa_train.infer\n"
        "def refuse(*a, **k): raise AssertionError('pickle')\n"
        "pickle.load = pickle.loads = pickle.Unpickler = pickle._Unpickler = torch.load = refuse\n"
        f"m = nsa_train.infer.load_model({str(run)!r}, device='cpu'); print(m.source.step)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "20", done.stderr


def test_the_tokenizer_of_the_loaded_model_reads_as_ours(run):
    loaded = load_model(run, device="cpu")
    (ours,) = ByteTokenizer().encode_batch(["héllo <|endoftext|>"])
    assert loaded.encode(["héllo <|endoftext|>"]) == [ours.tolist()]


@pytest.mark.parametrize("case", ["llama tied", "qwen2 sliding", "olmo3", "phi3 partial"])
def test_a_dense_folder_gives_the_logits_of_transformers(case, tmp_path):
    model, ids = save_dense(tmp_path / "dense", case), token_ids(60)
    loaded = load_reference(tmp_path / "dense", device=torch.device("cpu"), dtype=torch.float32)
    assert loaded.source.step is None
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_folder_of_ours_is_loaded_as_by_load_model(tmp_path):
    save_dense(tmp_path / "dense")
    convert_folder(tmp_path / "dense", tmp_path / "sparse", ConversionOptions(l=8, d=4, l_sel=16, n_sel=4, w=24))
    assert _is_source(tmp_path / "dense")
    assert not _is_source(tmp_path / "sparse")
    assert not _is_source(tmp_path)
    loaded = load_reference(tmp_path / "sparse", device=torch.device("cpu"), dtype=torch.bfloat16)
    assert loaded.model.config.layer_kinds() == ["merged"] * 4
    assert loaded.model.dtype == torch.bfloat16


def test_what_cannot_be_converted_cannot_be_compared_with(tmp_path):
    save_dense(tmp_path / "dense")
    (tmp_path / "dense" / "config.json").write_text('{"architectures": ["GemmaForCausalLM"], "model_type": "gemma"}')
    with pytest.raises(CheckpointError):
        load_reference(tmp_path / "dense", device=torch.device("cpu"), dtype=torch.float32)
