"""A folder exported with its modelling code loads where this package is not installed, and gives the same tokens."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="Transformers is in the hf extra")
from transformers import AutoModelForCausalLM

import nsa.hf
from nsa.hf.configuration import NSAConfig
from nsa.hf.remote_code import AUTO_MAP, remote_code_files
from nsa_train.convert.export_folder import export_folder, exported_config
from nsa_train.convert.import_folder import import_folder
from tests.trained_runs import files_of, save_run, settings

ROOT = Path(__file__).parents[3]
PROMPT = "a prompt long enough to leave the window of twenty-four tokens behind, and to fill selection blocks"

WITHOUT_PACKAGE = """
import json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("nsa", "pydantic", "pydantic_core", "olmo_core", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, resaved, prompt = sys.argv[1:]
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
given = tokenizer([prompt, prompt[:9]], return_tensors="pt", padding=True)
tokens = model.generate(**given, max_new_tokens=40, do_sample=False)
model.save_pretrained(resaved)
tokenizer.save_pretrained(resaved)
again = AutoModelForCausalLM.from_pretrained(resaved, trust_remote_code=True).eval()
assert torch.equal(again.generate(**given, max_new_tokens=40, do_sample=False), tokens)
loss = model(**given, labels=given["input_ids"]).loss
loss.backward()
assert "nsa" not in sys.modules
print(json.dumps({"tokens": tokens.tolist(), "class": type(model).__module__, "loss": loss.item()}))
"""


def without_package(folder: Path, resaved: Path, cache: Path) -> dict:
    environ = {name: value for name, value in os.environ.items() if name != "CONFIG"}
    environ |= {"HF_MODULES_CACHE": str(cache), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT_PACKAGE, str(folder), str(resaved), PROMPT]
    done = subprocess.run(command, cwd=cache, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("remote")
    save_run(folder / "run", settings(nsa={"phi": "mlp"}, model={"qk_norm": True}))
    export_folder(folder / "run", folder / "out", remote_code=True)
    return folder / "out"


def test_without_the_package_it_gives_the_same_tokens(exported, tmp_path):
    without = without_package(exported, tmp_path / "resaved", tmp_path)
    assert without["class"].startswith("transformers_modules.")
    from transformers import AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(exported).eval()
    assert type(model) is nsa.hf.NSAForCausalLM  # the installed class wins, without trust
    tokenizer = AutoTokenizer.from_pretrained(exported)
    inputs = tokenizer([PROMPT, PROMPT[:9]], return_tensors="pt", padding=True)
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=40, do_sample=False)
        loss = model(**inputs, labels=inputs["input_ids"]).loss
    assert without["tokens"] == tokens.tolist()
    assert without["loss"] == pytest.approx(loss.item(), abs=1e-4)
    # What was saved there is whole: Transformers copied the code, and it is read here too.
    code = {name for name in files_of(exported) if name.endswith(".py")}
    assert {name for name in files_of(tmp_path / "resaved") if name.endswith(".py")} == code
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "resaved")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_the_code_goes_through_import_and_export(exported, tmp_path):
    import_folder(exported, tmp_path / "back")
    export_folder(tmp_path / "back", tmp_path / "again", remote_code=True)
    assert files_of(tmp_path / "again") == files_of(exported)


def test_the_installed_model_saves_no_map_to_missing_code(exported, tmp_path):
    """Loaded by the installed class, the model is saved without a map to code that is not in the folder."""
    AutoModelForCausalLM.from_pretrained(exported).save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text()).get("auto_map")
    present = {path.stem for path in tmp_path.glob("*.py")}
    assert not auto_map or {value.partition(".")[0] for value in auto_map.values()} <= present


def test_code_is_exported_only_on_request(exported, tmp_path):
    save_run(tmp_path / "run")
    export_folder(tmp_path / "run", tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert "trust_remote_code" not in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((exported / "config.json").read_text())["auto_map"] == AUTO_MAP
    assert "trust_remote_code=True" in (exported / "README.md").read_text()


def test_every_file_is_found_by_the_loader_and_imports_nothing_of_the_package(tmp_path):
    from transformers.dynamic_module_utils import get_imports

    files = remote_code_files()
    assert {value.partition(".")[0] + ".py" for value in AUTO_MAP.values()} <= files.keys()
    for name, text in files.items():
        ast.parse(text)
        assert "nsa::" not in text, name
    allowed = {"torch", "transformers", "huggingface_hub"} | set(sys.stdlib_module_names)
    path = tmp_path / "module.py"
    for name, text in files.items():
        path.write_text(text)
        assert set(get_imports(path)) <= allowed, name


def test_the_code_is_the_source_with_other_imports():
    """Nothing is written twice: apart from imports and operator names a file is its source."""
    files = remote_code_files()
    for name, module in (("nsa_core_rope.py", "core/rope.py"), ("nsa_kernels_reference.py", "kernels/reference.py")):
        source = (ROOT / "packages/nsa-attention/nsa" / module).read_text().splitlines()
        added = set(files[name].splitlines()) - set(source)
        assert all(line.startswith(("# Generated", "from .")) for line in added), added


def test_the_defaults_of_the_config_are_those_of_a_run():
    from nsa_train.config.schema import RunConfig

    ours, theirs = NSAConfig(), exported_config(RunConfig(), 257, None)
    assert {**ours.to_dict(), "max_position_embeddings": 2048} == theirs.to_dict() | {"rope_compressed": "auto"} | {
        "qk_norm_eps": 1e-6
    }
