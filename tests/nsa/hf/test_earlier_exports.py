"""Folders that earlier versions exported, and checkpoints that they wrote, are the same models today."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("transformers", reason="Transformers is in the hf extra")
from transformers import AutoModelForCausalLM

import nsa.hf  # noqa: F401 (registers)
from nsa_train.checkpoint.trained_model import open_trained_model
from nsa_train.config.schema import RunConfig
from nsa_train.convert.export_folder import exported_config
from nsa_train.convert.import_folder import open_exported, run_config
from nsa_train.run_model import build_model
from tests.nsa.hf import earlier_exports as earlier

RECORD, LOGITS = earlier.record(), load_file(earlier.LOGITS)
ROUNDING = 1e-4


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def require_recorded(name: str, logits: Tensor) -> None:
    """Bit for bit on a processor and a torch like those of the record; elsewhere matrix products round otherwise."""
    if earlier.this_machine() == RECORD["machine"]:
        assert torch.equal(logits, LOGITS[name])
    torch.testing.assert_close(logits, LOGITS[name], atol=ROUNDING, rtol=ROUNDING)


def exported(case: str, folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(RECORD["cases"][case]["config"]))
    weights = earlier.drawn_weights(RECORD["cases"][case]["shapes"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@torch.no_grad()
def logits_of(folder: Path, vocab_size: int) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    return model(earlier.tokens(vocab_size), use_cache=False).logits


@pytest.mark.parametrize("case", earlier.CASES)
def test_an_exported_model_computes_the_same(case, tmp_path):
    require_recorded(case, logits_of(exported(case, tmp_path / "model"), 24)[:, ::3])


@pytest.mark.parametrize("case", earlier.CASES)
def test_an_exported_model_imports_with_the_settings_that_it_was_trained_with(case, tmp_path):
    folder = exported(case, tmp_path / "model")
    imported = run_config(open_exported(folder))
    trained = RunConfig.model_validate(earlier.settings_of(case))
    same = {"preset", "ffn_dim", "vocab_size"}  # one config has the values where the other leaves them to defaults
    assert imported.model.model_dump(exclude=same) == trained.model.model_dump(exclude=same)
    assert imported.nsa.model_dump(exclude=same) == trained.nsa.model_dump(exclude=same)


@pytest.mark.parametrize("case", earlier.CASES)
def test_the_settings_are_exported_in_the_same_form(case, tmp_path):
    config = exported_config(RunConfig.model_validate(earlier.settings_of(case)), 24, None)
    config.architectures, config.dtype = ["NSAForCausalLM"], torch.float32
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == RECORD["cases"][case]["config"]


def test_a_whole_folder_is_read():
    require_recorded("folder", logits_of(earlier.FOLDER, 257)[:, ::5, ::5])
    model = open_exported(earlier.FOLDER)
    assert model.record is not None
    assert model.tokenizer is not None
    assert run_config(model).model.dim == 8


@pytest.fixture
def run_folder(tmp_path) -> Path:
    shutil.unpack_archive(earlier.RUN, tmp_path, filter="data")
    return tmp_path / "earlier_run"


@torch.no_grad()
def test_a_checkpoint_is_the_same_model(run_folder):
    trained = open_trained_model(run_folder)
    model = build_model(trained.config, trained.vocab_size)
    model.load_state_dict(trained.tensors)
    require_recorded("run", model.eval()(earlier.tokens(trained.vocab_size))[:, ::5, ::5])
