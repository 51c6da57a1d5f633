"""Importing what needs no torch stays quick, so that `nsa --help` and `nsa config` answer at once."""

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tools.gate_times import FirstStepCost, first_step_cost

ROOT = Path(__file__).parents[1]
HEAVY = ("torch", "numpy", "olmo_core", "datasets", "pyarrow", "transformers", "triton")


def import_in_a_new_process(module: str) -> tuple[float, set[str]]:
    """Seconds of CPU time that the import took, and the top-level names of everything it loaded."""
    code = (
        "import json, sys, time; start = time.process_time(); "
        f"import {module}; took = time.process_time() - start; "
        "print(json.dumps([took, sorted({name.partition('.')[0] for name in sys.modules})]))"
    )
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    took_s, loaded = json.loads(output)
    return took_s, set(loaded)


def test_the_package_itself_is_free():
    assert import_in_a_new_process("nsa")[0] < 0.1
    assert not import_in_a_new_process("nsa")[1] & {*HEAVY, "pydantic", "yaml", "typer", "rich"}


@pytest.mark.parametrize("module", ["nsa.errors", "nsa_train.config", "nsa_train.cli.main", "nsa_train.cli.config"])
def test_nothing_heavy_is_imported(module):
    assert not import_in_a_new_process(module)[1] & set(HEAVY)


def test_the_command_line_does_not_load_the_settings_before_it_needs_them():
    assert "pydantic" not in import_in_a_new_process("nsa_train.cli.main")[1]


def test_the_attention_does_not_load_the_compiler_of_torch():
    """`torch._dynamo` takes longer to import than torch: it must wait until something is compiled."""
    code = "import sys, nsa.core.nsa_attention; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


NOT_IN_A_RANK = (
    "torch._dynamo", "torch._inductor", "torch.distributed.pipelining", "torch.utils.cpp_extension", "triton",
    "networkx", "setuptools", "cached_path", "google.cloud", "huggingface_hub", "transformers", "datasets", "pyarrow",
    "pandas", "requests", "chardet", "boto3", "fsspec", "olmo_core.nn.ddp",
    "olmo_core.train.train_module.transformer.ddp_train_module",
)  # fmt: skip
"""Modules that one rank on a CPU does not use: together they take longer to import than torch."""


@pytest.fixture(scope="module")
def first_step() -> FirstStepCost:
    pytest.importorskip("olmo_core", reason="the engine is in the train extra")
    return first_step_cost()


@pytest.mark.parametrize("module", NOT_IN_A_RANK)
def test_a_rank_does_not_import_what_it_does_not_use(first_step, module):
    assert module not in first_step.modules


PUBLIC = (
    "NSAAttention", "AttentionConfig", "nsa_attention", "compressed_attention", "select_blocks", "selected_attention",
    "sliding_attention", "block_sparse_attention", "compress_blocks", "NSATransformer", "NSACache", "Geometry",
)  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_imported_on_first_use(name):
    import nsa

    assert name in nsa.__all__
    assert name in dir(nsa)
    value = getattr(nsa, name)
    assert value.__name__ == name
    assert value.__module__ == nsa._HOMES[name]


def test_public_names_are_complete_and_known_to_type_checkers():
    import nsa

    source = ast.parse((ROOT / "packages/nsa-attention/nsa" / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in source.body if isinstance(node, ast.If)]
    typed = {alias.name: node.module for node in block.body for alias in node.names}
    assert typed == nsa._HOMES
    assert set(nsa.__all__) == {*PUBLIC, "__version__"} == {*nsa._HOMES, "__version__"}


def test_one_import_line_brings_the_whole_front_door():
    line = f"from nsa import {', '.join(PUBLIC)}; print(nsa_attention.__name__)"
    done = subprocess.run([sys.executable, "-c", line], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "nsa_attention"  # the function, not the module of that name in nsa.core


def test_the_mixer_is_a_public_name_of_the_trainer_that_is_imported_on_first_use():
    pytest.importorskip("olmo_core", reason="the engine is in the train extra")
    import nsa_train
    from nsa_train.train.engine import mixer

    assert not import_in_a_new_process("nsa_train")[1] & {*HEAVY, "pydantic", "yaml", "typer", "rich"}
    assert nsa_train.NSAMixerConfig is mixer.NSAMixerConfig
    assert set(nsa_train.__all__) == {*nsa_train._HOMES, "__version__"}


@pytest.mark.parametrize("package", ["nsa", "nsa_train"])
def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=f"'{package}' has no attribute 'nsa_atention'"):
        import_module(package).nsa_atention  # noqa: B018
