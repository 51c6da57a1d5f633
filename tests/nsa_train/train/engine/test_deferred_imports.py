"""Assumptions of `train.engine.deferred_imports` about the engine; real modules are imported on first use."""

import ast
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

import olmo_core

from nsa_train.train.engine.deferred_imports import (
    _DEFERRED_NAMES,
    _STORAGE_CLIENTS,
    _DeferredModule,
    deferred_imports,
)

ENGINE = Path(olmo_core.__file__).parent
AT_IMPORT = (ast.Module, ast.ClassDef, ast.If, ast.Try, ast.With)
"""Blocks whose statements run while a module is imported."""


# Forks a process for each program that stdin names; prints its exit code and what it printed.
_FORKS = """
import json, os, sys, traceback
import nsa_train.train.engine
for line in sys.stdin:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writer, 1)
        code = 1
        try:
            exec(json.loads(line), {"__name__": "__main__"})
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    os.close(writer)
    with open(reader) as said:
        text = said.read()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text]), flush=True)
"""


@pytest.fixture(scope="module")
def in_a_new_process() -> Iterator[Callable[[str], str]]:
    """Run a program in a process that has imported the engine's adapter before, and nothing else."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", _FORKS], text=True, bufsize=1, **pipes) as forks:

        def run(program: str) -> str:
            forks.stdin.write(json.dumps(program) + "\n")
            code, text = json.loads(forks.stdout.readline())
            assert code == 0
            return text.strip()

        yield run
        forks.stdin.close()


def imported_names(tree: ast.Module, module: str, package: str) -> dict[str, str]:
    """Local name → name in `module`, of what a file takes from it at its top."""
    names = {}
    for node in importing_statements(tree):
        base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        if ".".join([*base, *([node.module] if node.module else [])]) == module:
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
    return names


def importing_statements(node: ast.AST) -> Iterator[ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom):
            yield child
        elif isinstance(child, AT_IMPORT):
            yield from importing_statements(child)


def uses_beside_calls(tree: ast.Module, name: str) -> list[int]:
    """Lines that use a name in another way than to call it or as an annotation."""
    allowed: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            allowed.add(node.func)
        annotations = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        allowed.update(inner for each in annotations if each is not None for inner in ast.walk(each))
    return [
        node.lineno for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name and node not in allowed
    ]


def engine_files() -> Iterator[tuple[Path, str]]:
    """The files that were imported with the adapter, with the package of each."""
    import nsa_train.train.run  # noqa: F401

    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.startswith("olmo_core.") and file and Path(file).is_relative_to(ENGINE):
            yield Path(file), name if hasattr(module, "__path__") else name.rpartition(".")[0]


def test_the_engine_only_calls_what_is_deferred():
    """A name that is subclassed, compared or passed on must be taken out of _DEFERRED_NAMES."""
    names = {name for each in _DEFERRED_NAMES.values() for name in each}
    wrong = []
    for file, package in engine_files():
        if not any(name in (source := file.read_text(encoding="utf-8")) for name in names):
            continue
        tree = ast.parse(source)
        for module, deferred in _DEFERRED_NAMES.items():
            for local, name in imported_names(tree, module, package).items():
                if name in deferred:
                    wrong += [f"{file.relative_to(ENGINE)}:{line}: {local}" for line in uses_beside_calls(tree, local)]
    assert not wrong


def test_other_uses_than_calls_are_seen():
    source = "from x import A, b\nclass C(A):\n    pass\ndef f(a: A) -> A: return b(A())\nisinstance(1, A)\ng = b\n"
    tree = ast.parse(source)
    assert imported_names(tree, "x", "p") == {"A": "A", "b": "b"}
    assert (uses_beside_calls(tree, "A"), uses_beside_calls(tree, "b")) == ([2, 5], [6])


@pytest.mark.parametrize(("module", "names"), _DEFERRED_NAMES.items())
def test_deferred_names_exist_in_their_modules(module, names):
    if module.startswith("olmo_core.kernels"):
        pytest.importorskip("triton")
    assert all(callable(getattr(importlib.import_module(module), name)) for name in names)


def test_the_engines_client_of_storage_is_registered_when_cached_path_is_first_used(in_a_new_process):
    program = (
        "import sys, nsa_train.train.engine as e\n"
        "from olmo_core import io\n"
        "io.add_cached_path_clients(); assert 'cached_path' not in sys.modules\n"
        "print(io.cached_path(__import__('os').sep))\n"
        f"import {_STORAGE_CLIENTS} as schemes\n"
        "client = schemes._SCHEME_TO_CLIENT['weka']\n"
        "assert issubclass(client, (io._WekaClient)) and issubclass(client, schemes.SchemeClient)\n"
        "assert client.recoverable_errors == schemes.S3Client.recoverable_errors\n"
        "assert not client.__abstractmethods__\n"
    )
    assert in_a_new_process(program) == "/"


def test_an_error_of_requests_is_tried_again_before_and_after_requests_is_imported(in_a_new_process):
    program = (
        "import sys, nsa_train.train.engine\n"
        "from olmo_core import io\n"
        "from olmo_core.exceptions import OLMoNetworkError\n"
        "io._wait_before_retry = lambda attempt: None\n"
        "calls = []\n"
        "def fail(error):\n"
        "    def call():\n"
        "        calls.append(error)\n"
        "        raise error\n"
        "    try:\n"
        "        io.retriable()(call)()\n"
        "    except Exception as raised:\n"
        "        return type(raised)\n"
        "assert fail(ValueError()) is ValueError and len(calls) == 1\n"
        "assert 'requests' not in sys.modules\n"
        "session = io._get_http_session()\n"
        "import requests\n"
        "assert type(session) is requests.Session\n"
        "assert type(session.get_adapter('https://a')) is requests.adapters.HTTPAdapter\n"
        "assert fail(requests.exceptions.Timeout()) is OLMoNetworkError and len(calls) == 4\n"
        "assert fail(requests.exceptions.InvalidURL()) is requests.exceptions.InvalidURL and len(calls) == 5\n"
    )
    in_a_new_process(program)


def test_the_compiler_is_imported_by_the_first_call_of_a_function_that_is_hidden_from_it(in_a_new_process):
    program = (
        "import sys, torch, nsa_train.train.engine\n"
        "from olmo_core.nn.moe.mlp import MoEMLP\n"
        "from olmo_core.nn.functional import cross_entropy_loss\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "import torch._dynamo\n"
        "assert torch._dynamo is sys.modules['torch._dynamo'] and torch._dynamo.config.cache_size_limit\n"
        "assert torch.compile(lambda x: x + 1, backend='eager')(torch.zeros(1)).item() == 1\n"
    )
    in_a_new_process(program)


def test_a_submodule_of_a_deferred_module_is_the_real_one(tmp_path, monkeypatch):
    (tmp_path / "package_x").mkdir()
    (tmp_path / "package_x" / "__init__.py").write_text("answer = 42\n")
    (tmp_path / "package_x" / "part.py").write_text("runs = []\nruns.append(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(_DEFERRED_NAMES, "package_x", ("function",))
    with deferred_imports():
        stand_in = importlib.import_module("package_x")
        assert isinstance(stand_in, _DeferredModule)
        assert stand_in.answer == 42
    with deferred_imports():
        part = importlib.import_module("package_x.part")
    assert sys.modules["package_x"].part is part
    assert (part.runs, part.__spec__.name) == ([1], "package_x.part")
    monkeypatch.delitem(sys.modules, "package_x")
    monkeypatch.delitem(sys.modules, "package_x.part")
    with deferred_imports():
        part = importlib.import_module("package_x.part")
        assert sys.modules["package_x"].answer == 42
    assert (part.runs, part.__spec__.loader is not None) == ([1], True)
    for name in ("package_x", "package_x.part"):
        del sys.modules[name]


def test_nothing_of_it_is_left_after_the_engine_is_imported():
    with deferred_imports():
        pass
    assert not any(isinstance(module, _DeferredModule) for module in sys.modules.values())


def test_nothing_is_an_instance_of_a_class_that_was_never_imported(in_a_new_process):
    program = (
        "import sys, nsa_train.train.engine\n"
        "from olmo_core.train.callbacks import speed_monitor\n"
        "stand_in = speed_monitor.OLMoDDPTrainModule\n"
        "assert not isinstance(1, stand_in) and not isinstance(1, (str, stand_in))\n"
        "import olmo_core.train.train_module.transformer.ddp_train_module as real\n"
        "assert isinstance(object.__new__(real.OLMoDDPTrainModule), stand_in) and not isinstance(1, stand_in)\n"
    )
    in_a_new_process(program)
