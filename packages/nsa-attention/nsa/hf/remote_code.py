"""Modelling code for `nsa export hf --remote-code`, generated from the source files of this package.

Transformers copies modules of one folder that import each other as `from .name import …`. So every module that
`nsa.hf.modeling` needs is written as one file in that folder, with its imports rewritten and nothing else changed. The
compiled kernels (C++, Triton) stay out: the portable backend computes the attention, in PyTorch.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from nsa import __version__

_PACKAGE = "nsa"
_ROOT = Path(__file__).parents[2]
_FILES = {"nsa.hf.configuration": "configuration_nsa", "nsa.hf.modeling": "modeling_nsa"}
"""Modules whose files have the names that Transformers' own models use."""
_LEFT_OUT = ("nsa.kernels.cpu", "nsa.kernels.triton", "nsa.kernels.self_check")
_STAND_IN = "nsa_left_out"
_STAND_IN_TEXT = '''\
"""In place of the kernels of nsa-train that are compiled, which this folder does not hold."""


def why_not(*arguments):
    return "this folder holds the portable backend only; install nsa-train for compiled kernels"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
'''
_NAMESPACE = '"nsa::'
"""How the name of an operator begins in a source file."""
AUTO_MAP = {
    "AutoConfig": f"{_FILES['nsa.hf.configuration']}.NSAConfig",
    "AutoModel": f"{_FILES['nsa.hf.modeling']}.NSAModel",
    "AutoModelForCausalLM": f"{_FILES['nsa.hf.modeling']}.NSAForCausalLM",
}


@cache
def remote_code_files() -> dict[str, str]:
    """File name → text of the modelling code."""
    texts, waiting = {}, ["nsa.hf.modeling"]
    while waiting:
        module = waiting.pop()
        if module in texts:
            continue
        source = _source(module).read_text(encoding="utf-8")
        texts[module] = _rewrite(source, module)
        waiting += [needed for needed in _imported(source) if not _is_left_out(needed)]
    files = {f"{_file_of(module)}.py": text for module, text in sorted(texts.items())}
    return {**files, f"{_STAND_IN}.py": _STAND_IN_TEXT}


def _source(module: str) -> Path:
    path = _ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _is_module(name: str) -> bool:
    return name.partition(".")[0] == _PACKAGE and _source(name).is_file()


def _is_left_out(module: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in _LEFT_OUT)


def _file_of(module: str) -> str:
    return _STAND_IN if _is_left_out(module) else _FILES.get(module, module.replace(".", "_"))


def _own_imports(source: str) -> Iterator[ast.ImportFrom]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").partition(".")[0] == _PACKAGE:
            yield node
        elif isinstance(node, ast.ImportFrom) and node.level:
            raise AssertionError(f"line {node.lineno}: only absolute imports can be rewritten")
        elif isinstance(node, ast.Import):
            assert all(alias.name.partition(".")[0] != _PACKAGE for alias in node.names), ast.unparse(node)


def _imported(source: str) -> Iterator[str]:
    for node in _own_imports(_without_type_checking(source)):
        modules, values = _split(node)
        yield from modules.values()
        if values:
            assert node.module is not None
            yield node.module


def _split(node: ast.ImportFrom) -> tuple[dict[str, str], list[str]]:
    """Local name → module for imported modules, and the other imported names as they are written."""
    modules = {a.asname or a.name: full for a in node.names if _is_module(full := f"{node.module}.{a.name}")}
    return modules, [ast.unparse(a) for a in node.names if not _is_module(f"{node.module}.{a.name}")]


def _rewrite(source: str, module: str) -> str:
    source = _without_type_checking(source)
    lines = source.splitlines(keepends=True)
    for node in sorted(_own_imports(source), key=lambda node: node.lineno, reverse=True):
        assert node.end_lineno is not None
        indent = " " * node.col_offset
        lines[node.lineno - 1 : node.end_lineno] = [f"{indent}{line}\n" for line in _relative(node)]
    head = f"# Generated from {_source(module).relative_to(_ROOT)} of nsa-train {__version__} (Apache-2.0).\n"
    return head + _with_own_operators("".join(lines))


def _with_own_operators(text: str) -> str:
    """Operators get names of their own in every copy that is loaded: defining one twice ends the process."""
    if _NAMESPACE not in text:
        return text
    lines = text.replace(_NAMESPACE, '_OPERATORS + "').splitlines(keepends=True)
    last = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)][-1]
    lines.insert(last.end_lineno or 0, "import uuid\n\n_OPERATORS = f'nsa_{uuid.uuid4().hex}::'\n")
    return "".join(lines)


def _relative(node: ast.ImportFrom) -> Iterator[str]:
    modules, values = _split(node)
    if values:
        assert node.module is not None
        yield f"from .{_file_of(node.module)} import {', '.join(values)}"
    for name, module in modules.items():
        yield f"from .{_file_of(module)} import __name__ as _"  # the form that Transformers' loader looks for
        yield f"from . import {_file_of(module)} as {name}"


def _without_type_checking(source: str) -> str:
    """Remove `if TYPE_CHECKING:` blocks, whose imports are not needed to run."""
    lines = source.splitlines(keepends=True)
    for node in reversed(ast.parse(source).body):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not node.orelse:
            assert node.end_lineno is not None
            del lines[node.lineno - 1 : node.end_lineno]
    return "".join(lines)
