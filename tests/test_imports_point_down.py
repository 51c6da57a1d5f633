"""Imports point downwards only, the engine and Transformers have one importer each, one place reads the environment.

The rules read the source, not the running program: an import inside a function or under TYPE_CHECKING counts too.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import nsa
import nsa_train

ROOT = Path(__file__).parents[1]

# A package may import from the rows below its own.
TRAINER_LAYERS = (
    ("cli",),
    ("infer",),
    ("convert",),
    ("train", "watch"),
    ("planning",),
    ("run_model",),
    ("record", "checkpoint"),
    ("data", "config"),
    ("storage",),
    ("names", "terminal_text", "shipped", "listen_address"),
)
LIBRARY_LAYERS = (
    ("check", "bench"),
    ("hf", "vllm"),
    ("model",),
    ("core",),
    ("kernels",),
    ("child_process",),
    ("files", "gpus", "geometry", "token_counts", "kernel_variables"),
    ("option_fields",),
    ("errors", "options", "__init__"),
)
LAYERS = (*TRAINER_LAYERS, *LIBRARY_LAYERS)
# Packages of one row do not import each other, and none imports one above, with these exceptions.
NEIGHBOURS = {
    ("vllm", "hf"),  # vLLM reads a model's config with Transformers
    ("check", "bench"),  # the GPU check times
    ("bench", "check"),  # the benchmark withholds ratios by the errors and limits of all checks
}
LEVEL = {package: level for level, row in enumerate(LAYERS) for package in row}
ROWS = {
    "nsa": {package for row in LIBRARY_LAYERS for package in row},
    "nsa_train": {package for row in TRAINER_LAYERS for package in row},
}

OUTSIDE = ("proofs", "tools", "tests", "scripts", "experiments")
ENGINE, ENGINE_ADAPTER = "olmo_core", "nsa_train.train.engine"
VLLM, IMPORTS_VLLM = "vllm", "nsa.vllm"
TRANSFORMERS = ("transformers", "peft", "accelerate")
IMPORTS_TRANSFORMERS = ("nsa.hf", "nsa.vllm", "nsa_train.convert", "nsa_train.infer")
# Private members of these may be used in nsa_train.train outside the adapter.
NOT_ENGINE = {"self", "cls", "torch"}
READS_ENVIRONMENT = (
    "nsa_train.config.env",
    "nsa.kernel_variables",
    "nsa_train.train",
    "nsa_train.storage",  # only sets
    "nsa_train.data.tokenizer",  # only sets
    "nsa_train.cli.startup",  # only sets, for OpenMP and tqdm
    "nsa.kernels.self_check",  # only passes it on, to a child process
    "nsa.check.gpu_check_report",  # only removes the names in it
)
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def sources() -> dict[str, Path]:
    """Dotted module name → file; a package's __init__ keeps the name, so that relative imports resolve."""
    return {
        ".".join(file.relative_to(ROOT).parts[2:]).removesuffix(".py"): file
        for file in sorted(ROOT.glob("packages/*/nsa*/**/*.py"))
    }


def imports(module: str, source: str) -> Iterator[str]:
    """Every module a source names, `from a import b` as a.b, relative forms and import_module("a") included.

    The __init__.py of both packages offer public names lazily: what they import for type checkers alone is not counted.
    """
    tree = ast.parse(source)
    if module in ("nsa.__init__", "nsa_train.__init__"):
        tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and is_for_type_checkers(node))]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
            "import_module",
            "resolve_name",
            "__import__",
        ):
            yield from (str(arg.value).partition(":")[0] for arg in node.args[:1] if isinstance(arg, ast.Constant))


def is_for_type_checkers(node: ast.If) -> bool:
    return ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse


def package_of(module: str) -> str | None:
    """The row entry a module belongs to: nsa.core.rope → core, nsa or nsa.__version__ → __init__, torch → None.

    A public name belongs where it is defined: nsa.NSAAttention → core.
    """
    root, _, rest = module.partition(".")
    if root not in ROWS:
        return None
    if rest in (homes := {"nsa": nsa._HOMES, "nsa_train": nsa_train._HOMES}[root]):
        return package_of(homes[rest])
    package = rest.partition(".")[0]
    here = any((folder / package).is_dir() for folder in ROOT.glob(f"packages/*/{root}"))
    return package if package and (here or package in ROWS[root]) else "__init__"


def reads_environment(source: str) -> bool:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and ast.unparse(node.value) == "os":
            return True
        if isinstance(node, ast.ImportFrom) and node.module == "os" and ENVIRONMENT & {a.name for a in node.names}:
            return True
    return False


def private_members(source: str) -> Iterator[str]:
    """`object._member` on anything but self, cls and torch; `_asdict` and alike of named tuples are public."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            owner = node.value if ast.unparse(root) != "torch" else root
            if ast.unparse(owner) not in NOT_ENGINE and node.attr not in ("_asdict", "_fields", "_replace"):
                yield ast.unparse(node)


def inside(module: str, homes: tuple[str, ...]) -> bool:
    return any(module == home or module.startswith(f"{home}.") for home in homes)


def mistakes(module: str, source: str) -> Iterator[str]:
    here = package_of(module)
    assert here is not None
    if here not in LEVEL:
        yield f"{here} is in no row of LAYERS: say where it stands"
        return
    for name in imports(module, source):
        there = package_of(name)
        if name.partition(".")[0] in OUTSIDE:
            yield f"{module} imports {name}: it is not part of the installed package"
        if name.partition(".")[0] == ENGINE and not inside(module, (ENGINE_ADAPTER,)):
            yield f"{module} imports {name}: only {ENGINE_ADAPTER} imports the engine, so that it can be replaced"
        if module.startswith("nsa.") and name.partition(".")[0] == "nsa_train":
            yield f"{module} imports {name}: the library does not know the trainer"
        if (name.partition(".")[0] in TRANSFORMERS or inside(name, ("nsa.hf",))) and not inside(
            module, IMPORTS_TRANSFORMERS
        ):
            yield f"{module} imports {name}: only {' and '.join(IMPORTS_TRANSFORMERS)} import Transformers"
        if name.partition(".")[0] == VLLM and not inside(module, (IMPORTS_VLLM,)):
            yield f"{module} imports {name}: only {IMPORTS_VLLM} imports vLLM"
        if there is None or there == here or (here, there) in NEIGHBOURS:
            continue
        if there not in LEVEL:
            yield f"{module} imports {name}: {there} is in no row of LAYERS"
        elif LEVEL[there] <= LEVEL[here]:
            yield f"{module} imports {name}: {there} does not stand below {here}"
    if inside(module, ("nsa_train.train",)) and not inside(module, (ENGINE_ADAPTER,)):
        for member in private_members(source):
            yield f"{module} uses {member}: private members of the engine are used in {ENGINE_ADAPTER} alone"
    if reads_environment(source) and not inside(module, READS_ENVIRONMENT):
        yield f"{module} reads the environment: config.env does that, and train for torchrun's variables"


def test_every_module_keeps_the_directions() -> None:
    modules = sources()
    assert {"nsa.__init__", "nsa.errors", "nsa_train.config.schema", "nsa_train.cli.main"} <= modules.keys()
    wrong = [line for module, file in modules.items() for line in mistakes(module, file.read_text(encoding="utf-8"))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("nsa.kernels.sdpa", "import nsa.core.rope"),
        ("nsa.kernels.sdpa", "from nsa.core import rope"),
        ("nsa.kernels.sdpa", "from nsa import core"),
        ("nsa.kernels.sdpa", "from ..core import rope"),
        ("nsa.kernels.sdpa", "from .. import core"),
        ("nsa.kernels.__init__", "from ..core import rope"),
        ("nsa.kernels.cpu.build", "from ...core.rope import rotate"),
        ("nsa.core.rope", "def f():\n    import nsa.model"),
        ("nsa.core.rope", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nsa_train.config import X"),
        ("nsa.core.rope", "import importlib\nimportlib.import_module('nsa_train.train')"),
        ("nsa.core.rope", "import pkgutil\npkgutil.resolve_name('nsa.check.prove:prove')"),
        ("nsa_train.config.load", "from nsa_train.cli import main"),
        ("nsa_train.data.document_stream", "from nsa_train.record import heartbeat_record"),
        ("nsa.errors", "from nsa.kernels import registry"),
        ("nsa.__init__", "from nsa.core import rope"),
        ("nsa.__init__", "from .core import rope"),
        ("nsa.__init__", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import nsa.core"),
        ("nsa.__init__", "def __getattr__(name):\n    from nsa.core import rope"),
        ("nsa.core.rope", "from nsa import NSATransformer"),
        ("nsa.kernels.sdpa", "from .. import nsa_attention"),
        ("nsa_train.record.heartbeat_record", "import olmo_core"),
        ("nsa_train.run_model", "from transformers import PreTrainedConfig"),
        ("nsa_train.train.run", "import nsa.hf"),
        ("nsa.hf.modeling", "from nsa_train.infer import load_model"),
        ("nsa.hf.modeling", "from nsa.vllm.step import PagedStep"),
        ("nsa_train.infer.serve", "from vllm import LLM"),
        ("nsa_train.planning.preflight_rules", "from olmo_core.train import Trainer"),
        ("nsa_train.cli.main", "from olmo_core import x"),
        ("nsa_train.train.run", "from olmo_core.train import Trainer"),
        ("nsa_train.train.callbacks.heartbeat_callback", "from olmo_core.train.callbacks import Callback"),
        ("nsa_train.train.dry_run", "def f(module):\n    return module._clip_grad_norm(1.0)"),
        ("nsa_train.train.run_outputs", "class A:\n    def f(self):\n        self.trainer._metrics.clear()"),
        ("nsa_train.watch.watchdog", "from nsa_train.train import build"),
        ("nsa_train.train.run", "def f():\n    from nsa_train.watch.health import examine"),
        ("nsa_train.record.run_data", "from nsa_train.watch.run_reader import RunReader"),
        ("nsa.check.gpu_check", "from proofs.perf_model import predict"),
        ("nsa_train.cli.bench", "import importlib\nimportlib.import_module('proofs.perf_model')"),
        ("nsa.core.rope", "import os\nos.environ['NSA_X']"),
        ("nsa.core.rope", "import os\nos.getenv('NSA_X')"),
        ("nsa.core.rope", "from os import environ"),
        ("nsa_train.config.load", "import os\nos.environ.get('CONFIG')"),
    ],
)
def test_a_wrong_direction_is_seen(module: str, source: str) -> None:
    assert list(mistakes(module, source))


def test_a_package_without_a_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(LEVEL, "config")
    assert list(mistakes("nsa_train.config.load", "import nsa.errors")) == [
        "config is in no row of LAYERS: say where it stands"
    ]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "nsa_train.cli.main",
            "from nsa import __version__\nfrom nsa.errors import X\nfrom nsa_train.cli import config",
        ),
        ("nsa_train.cli.main", "from . import config\nfrom .. import __version__"),
        ("nsa_train.run_model", "from nsa import NSAAttention, Geometry"),
        ("nsa.__init__", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from nsa.core import rope"),
        ("nsa.core.__init__", "from .rope import rotate\nfrom ..kernels import plan"),
        (
            "nsa_train.train.engine.build",
            "import olmo_core.train\nimport os\nos.environ['RANK']\nfrom nsa_train.record import heartbeat_record",
        ),
        ("nsa_train.config.env", "import os\nos.environ.items()"),
        ("nsa.hf.modeling", "import transformers.cache_utils\nfrom nsa.model import transformer"),
        ("nsa_train.train.engine.build", "def f(trainer):\n    trainer._metrics.clear()"),
        (
            "nsa_train.train.run_outputs",
            "import torch\nclass A:\n    def f(self):\n        return self._a, torch._C._x",
        ),
        (
            "nsa.kernels.sdpa",
            "import os\nos.path.join('a', 'b')\nimport torch\nfrom nsa.errors import KernelUnavailable",
        ),
    ],
)
def test_a_right_direction_passes(module: str, source: str) -> None:
    assert list(mistakes(module, source)) == []
