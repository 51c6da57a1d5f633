"""Parser of PTX text: one kernel with its parameters, registers, instructions and labels.

Accepts what LLVM's NVPTX backend prints for Triton kernels: one instruction per line. Anything else is an error.
"""

import re
from dataclasses import dataclass, field
from pathlib import PurePath


class UnsupportedPtx(Exception):
    """PTX that the emulator does not know: it refuses instead of guessing."""


@dataclass(frozen=True)
class Register:
    name: str


@dataclass(frozen=True)
class Immediate:
    bits: int
    is_float: bool = False


@dataclass(frozen=True)
class SymbolName:
    """A label, a parameter, a shared-memory symbol or a special register such as %tid.x."""

    name: str


@dataclass(frozen=True)
class VectorOperand:
    elements: tuple["Operand", ...]


@dataclass(frozen=True)
class AddressOperand:
    base: "Register | SymbolName"
    offset: int


Operand = Register | Immediate | SymbolName | VectorOperand | AddressOperand


@dataclass(frozen=True)
class Guard:
    register: str
    negated: bool


@dataclass(frozen=True)
class Instruction:
    opcode: str
    operands: tuple[Operand, ...]
    guard: Guard | None
    line: int
    text: str
    source: str
    used_bytes: int | None = None
    """Bytes of a load that are used, from the pragma before it: a bit for each byte that anything depends on."""

    @property
    def family(self) -> str:
        return self.opcode.partition(".")[0]


@dataclass(frozen=True)
class KernelParameter:
    name: str
    type: str
    """u64, u32, f32 and so on."""


@dataclass
class PtxKernel:
    name: str
    target: str
    parameters: list[KernelParameter] = field(default_factory=list)
    threads: int = 0
    registers: dict[str, str] = field(default_factory=dict)
    """Kind by prefix: {"%r": "b32"}."""
    shared_symbols: dict[str, int] = field(default_factory=dict)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    """Index of the instruction that follows each label."""

    def register_kind(self, name: str) -> str:
        return self.registers[name.rstrip("0123456789")]


_ENTRY = re.compile(r"\.entry\s+(\w+)\(")
_PARAMETER = re.compile(r"\.param\s+\.(\w+)\s+(?:\.ptr\s+(?:\.\w+\s+)?\.align\s+\d+\s+)?(\w+)")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(%\w+)<(\d+)>;$")
_LABEL = re.compile(r"(\$?[\w$]+):$")
_GUARD = re.compile(r"@(!?)(%p\d+)\s+(.*)$")
_OPCODE = re.compile(r"([a-z][\w.:]*)\s*(.*);$")
_REGISTER = re.compile(r"%[a-z]+\d+$")
_SPECIAL = re.compile(r"%[a-z]+(\.[xyz])?$")
_INTEGER = re.compile(r"(-?)(0[xX][0-9a-fA-F]+|\d+)U?$")
_NAME = re.compile(r"[A-Za-z_$][\w$]*$")


def parse(text: str) -> PtxKernel:
    """The only kernel of a PTX module."""
    header, _, rest = text.partition(".entry")
    if ".entry" in rest:
        raise UnsupportedPtx("more than one .entry in a module")
    target = re.search(r"\.target\s+(\w+)", header)
    entry = _ENTRY.search(text)
    if target is None or entry is None:
        raise UnsupportedPtx("a module without .target or .entry")
    kernel = PtxKernel(entry.group(1), target.group(1))
    for symbol in re.finditer(r"\.extern\s+\.shared\s+\.align\s+\d+\s+\.b8\s+(\w+)\[\];", header):
        kernel.shared_symbols[symbol.group(1)] = 0
    if re.search(r"^\s*\.shared", header, re.MULTILINE) or ".func" in header:
        raise UnsupportedPtx("static shared memory or a function in the module")
    _read_body(kernel, text)
    return kernel


def _read_body(kernel: PtxKernel, text: str) -> None:
    files = {n: PurePath(path).name for n, path in re.findall(r'\.file\s+(\d+)\s+"([^"]+)"', text)}
    lines = text.split("\n")
    first = next(i for i, line in enumerate(lines) if ".entry" in line)
    inside, source, used = False, "", None
    for number, line in enumerate(lines[first:], first + 1):
        code = line.partition("//")[0].strip()
        if not code or code == ")":
            continue
        if not inside:
            inside = _read_header_line(kernel, code)
        elif code == "}":
            return
        elif code.startswith(".loc"):
            _, file, row, *_ = code.split()
            source = f"{files.get(file, '?')}:{row}"
        elif match := _REGISTERS.match(code):
            kernel.registers[match.group(2)] = match.group(1)
        elif match := _LABEL.match(code):
            kernel.labels[match.group(1)] = len(kernel.instructions)
        elif match := re.match(r'\.pragma "used_bytes_mask (0x[0-9a-f]+)";$', code):
            used = int(match.group(1), 16)
        else:
            kernel.instructions.append(_read_instruction(code, number, source, used))
            used = None
    raise UnsupportedPtx("a kernel without an end")


def _read_header_line(kernel: PtxKernel, code: str) -> bool:
    """Read a line before the body; True at its opening brace."""
    if match := _PARAMETER.match(code):
        kernel.parameters.append(KernelParameter(match.group(2), match.group(1)))
    elif match := re.match(r"\.reqntid\s+(\d+)(?:,\s*1,\s*1)?$", code):
        kernel.threads = int(match.group(1))
    elif code == "{":
        return True
    elif ".entry" not in code and not re.match(r"\.(maxnreg|minnctapersm)\b", code):
        raise UnsupportedPtx(f"unknown line before the body: {code}")
    return False


def _read_instruction(code: str, line: int, source: str, used_bytes: int | None) -> Instruction:
    guard, body = None, code
    if match := _GUARD.match(code):
        guard, body = Guard(match.group(2), bool(match.group(1))), match.group(3)
    match = _OPCODE.match(body)
    if match is None:
        raise UnsupportedPtx(f"line {line} is no instruction: {code}")
    opcode = match.group(1).replace(".shared::cta", ".shared")  # the same state space, as Triton 3.8 writes it
    operands = tuple(_operand(part, line) for part in _split(match.group(2)))
    return Instruction(opcode, operands, guard, line, code, source, used_bytes)


def _split(text: str) -> list[str]:
    """Split at commas outside of braces and brackets."""
    parts, depth, begin = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "{[") - (c in "}]")
        if c == "," and depth == 0:
            parts.append(text[begin:i])
            begin = i + 1
    return [part.strip() for part in [*parts, text[begin:]] if part.strip()]


def _operand(text: str, line: int) -> Operand:
    if text.startswith("{"):
        return VectorOperand(tuple(_operand(part, line) for part in _split(text[1:-1])))
    if text.startswith("["):
        base, _, offset = (part.strip() for part in text[1:-1].partition("+"))
        operand = _operand(base, line)
        if not isinstance(operand, Register | SymbolName):
            raise UnsupportedPtx(f"line {line}: address {text}")
        return AddressOperand(operand, int(offset, 0) if offset else 0)
    if _REGISTER.match(text):
        return Register(text)
    if _SPECIAL.match(text):
        return SymbolName(text)
    if match := re.match(r"0[fF]([0-9a-fA-F]{8})$|0[dD]([0-9a-fA-F]{16})$", text):
        return Immediate(int(match.group(1) or match.group(2), 16), is_float=True)
    if match := _INTEGER.match(text):
        value = int(match.group(2), 0)
        return Immediate(-value if match.group(1) else value)
    if _NAME.match(text):
        return SymbolName(text)
    raise UnsupportedPtx(f"line {line}: operand {text}")
