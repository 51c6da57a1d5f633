"""Benchmark shapes by name, and parsing of lengths and dtypes from the command line."""

from dataclasses import dataclass

from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.kernels.registry import KernelShape

BASE_GEOMETRY = Geometry(l=32, d=16, l_sel=64, n_sel=16, w=512)


@dataclass(frozen=True)
class BenchShape:
    n_heads: int
    n_kv_groups: int
    d_k: int
    d_v: int
    geometry: Geometry

    @property
    def heads_per_group(self) -> int:
        return self.n_heads // self.n_kv_groups

    @property
    def kernel(self) -> KernelShape:
        return KernelShape(self.n_kv_groups, self.heads_per_group, self.d_k, self.d_v, self.geometry)

    def describe(self) -> str:
        g = self.geometry
        return (
            f"{self.n_heads} heads, {self.n_kv_groups} groups, d_k={self.d_k} d_v={self.d_v}, "
            f"l={g.l} d={g.d} l_sel={g.l_sel} n_sel={g.n_sel} w={g.w}"
        )


SHAPES: dict[str, BenchShape] = {
    "base": BenchShape(12, 2, 64, 64, BASE_GEOMETRY),
    "gqa16": BenchShape(32, 2, 64, 64, BASE_GEOMETRY),
    "paper": BenchShape(64, 4, 192, 128, BASE_GEOMETRY),
    "tiny": BenchShape(6, 2, 16, 16, Geometry(l=8, d=4, l_sel=8, n_sel=4, w=16)),
}
FORMER_NAMES = {"seed": "base"}
"""Spellings that recorded commands use."""
DTYPES = ("fp32", "bf16", "fp16")
PARTS = ("all", "compressed", "select", "selected", "sliding")


def shape_named(name: str) -> BenchShape:
    name = FORMER_NAMES.get(name, name)
    if name not in SHAPES:
        raise ConfigError(f"--shape is {name!r}: there is no such shape. Use one of: {', '.join(SHAPES)}.")
    return SHAPES[name]
