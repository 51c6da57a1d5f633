"""Upper bounds of integers in a Triton kernel's intermediate representation, for the arguments of a recorded launch.

Finds 32-bit products that can exceed 31 bits. Bounds are of absolute values; what is loaded from memory is bounded by
the argument it is loaded from.
"""

import re
from collections.abc import Mapping
from typing import Any

import torch
from triton._C.libtriton import ir
from triton.compiler import ASTSource, make_backend

from nsa.gpus import ARCHITECTURES
from proofs.compile_report.machine_code import compile_target
from tests.nsa.kernels.launch_recorder import RecordedLaunch

_POINTER_TYPES = {
    torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
_LARGEST = 2**31
_LOOP = re.compile(
    r"^\s*(?:(%\w+)(?::\d+)? = )?scf\.for (%\w+) = (%[\w#]+) to (%[\w#]+) step \S+(?: iter_args\((.*?)\))?"
)
_OPERATION = re.compile(r"^\s*(%\w+)(?::\d+)?(?:, %\w+)* = \"?([\w.]+)\"?(.*)$")
_VALUE = re.compile(r"%[\w#]+")


def ttir_of(launch: RecordedLaunch) -> str:
    """Inlined and simplified, as every GPU's compiler starts from it."""
    target = compile_target(ARCHITECTURES["sm_80"])
    backend, context = make_backend(target), ir.context()
    signature, constants = {}, {}
    for parameter in launch.function.params:
        value = launch.arguments.get(parameter.name)
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _POINTER_TYPES[value.dtype]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32" if value < _LARGEST else "i64"
    source, options = ASTSource(launch.function, signature, constants), backend.parse_options(dict(launch.options))
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source.make_ir(
        target, options, backend.get_codegen_implementation(options), backend.get_module_map(), context
    )
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    return str(stages["ttir"](module, {}))


class IntegerBounds:
    """The largest absolute value of each integer. `loaded`: of integers in memory, by argument; `carried`: of integers
    that loops and branches hand on; `facts`: of the kernel's variables, where it is known and does not follow."""

    def __init__(
        self, launch: RecordedLaunch, loaded: Mapping[str, int], carried: int, facts: Mapping[str, int] | None = None
    ) -> None:
        self._launch, self._loaded, self._carried, self._facts = launch, loaded, carried, facts or {}
        self._largest = {f"%{name}": x if isinstance(x, int) else 0 for name, x in launch.arguments.items()}
        self._root = {f"%{name}": name for name in launch.arguments}
        """The argument that a pointer points into."""

    def overflowing_products(self) -> list[str]:
        """32-bit products that may take more than 31 bits, as lines of TTIR."""
        products = []
        for line in ttir_of(self._launch).splitlines():
            text = re.sub(r" loc\(.*$", "", line)
            if match := _LOOP.match(text):
                self._enter_loop(*match.groups())
            elif match := _OPERATION.match(text):
                name, operation, rest = match.groups()
                largest = self._bound(name, operation, rest)
                if operation == "arith.muli" and text.endswith(("i32", "i32>")) and largest >= _LARGEST:
                    products.append(f"{self._launch.kernel}: {text.strip()} (up to {largest:,})")
                self._largest[name] = self._known(name, largest)
        return products

    def _known(self, name: str, largest: int) -> int:
        return min(largest, self._facts.get(re.sub(r"(_\d+)?(#\d+)?$", "", name[1:]), largest))

    def _of(self, name: str) -> int:
        return self._largest.get(name, self._carried)

    def _enter_loop(self, result: str | None, index: str, low: str, high: str, carried: str | None) -> None:
        self._largest[index] = max(self._of(low), self._of(high))
        for i, (inside, initial) in enumerate(re.findall(r"(%\w+) = (%[\w#]+)", carried or "")):
            for name in (inside, f"{result}#{i}", result or inside):
                self._largest[name] = self._known(name, max(self._of(initial), self._carried))
                if initial in self._root:
                    self._root[name] = self._root[initial]

    def _bound(self, name: str, operation: str, rest: str) -> int:
        if operation == "arith.constant":
            number = re.match(r"\s*(?:dense<)?(-?\d+)>?\s*:", rest)
            return abs(int(number[1])) if number else 0
        if operation.startswith("tt.get_"):
            size = (*self._launch.grid, 1, 1)["xyz".index(rest.split()[0])]
            return size - 1 if operation == "tt.get_program_id" else size
        if operation == "tt.make_range":
            return int(re.search(r"end = (\d+)", rest)[1]) - 1  # type: ignore[index]
        operands = _VALUE.findall(rest.split(" : ")[0])
        if root := next((self._root[x] for x in operands if x in self._root), None):
            self._root[name] = root
            if operation == "tt.load":
                return self._loaded.get(root, 0)
        a, b, *_ = [*(self._of(x) for x in operands), 0, 0]
        match operation.removeprefix("arith."):
            case "muli":
                return a * b
            case "addi" | "subi" | "ori" | "xori":
                return a + b
            case "divsi":
                return a // max(1, b) if "%c" in operands[1] else a
            case "remsi" | "minsi" | "andi":
                return min(a, b)
            case "shli":
                return a << b
            case "shrsi":
                return a >> b if "%c" in operands[1] else a
            case "select":
                return max(self._of(x) for x in operands[1:])
            case "cmpi" | "cmpf":
                return 1
            case "trunci":
                return min(a, _LARGEST - 1)
        return max((self._of(x) for x in operands), default=self._carried)
