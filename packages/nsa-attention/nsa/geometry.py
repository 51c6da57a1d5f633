"""NSA block sizes (l, d, l_sel, n_sel, w): validation, block counts, keys read per token; default feed-forward width.

Needs no torch, so that configuration and planning can use it too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from math import gcd, lcm
from typing import Any

from nsa.errors import BrokenRule, require_rules
from nsa.option_fields import ARGUMENT_NAMES, OptionNames, broken_limits, option

FORCED_BLOCKS = 3  # the first block and the two nearest the query are always selected
_FFN_MULTIPLE = 64
_LARGEST_WINDOW = 2**31 - 1
LARGEST_BLOCK = 2**16
MOST_BLOCKS = 2**16
_TOKENS: dict[str, Any] = dict(unit="tokens", at_least=1, because="it counts tokens")


@dataclass(frozen=True)
class Geometry:
    """Compressed blocks of `l` tokens every `d`; `n_sel` selected blocks of `l_sel` tokens; a window of `w` tokens.

    The defaults are the paper's.
    """

    l: int = option(32, "Length of a compression block.", **_TOKENS)
    d: int = option(16, "Stride between compression blocks; divides l and l_sel.", **_TOKENS)
    l_sel: int = option(64, "Length of a selection block.", **_TOKENS)
    n_sel: int = option(
        16, "Selected blocks per query, including the first block and two local ones.", unit="blocks", at_least=1
    )
    w: int = option(512, "Length of the sliding window, including the query's own token.", **_TOKENS)

    def __post_init__(self) -> None:
        _require_sizes(self.l, self.d, self.l_sel, self.n_sel, self.w)

    def broken_rules(self, names: OptionNames = ARGUMENT_NAMES) -> Iterator[BrokenRule]:
        """Every rule that these sizes break."""
        if limits := list(broken_limits(self, names)):
            yield from limits
            return
        for size in ("l", "d", "l_sel"):
            if (value := getattr(self, size)) > LARGEST_BLOCK:
                yield BrokenRule(
                    (names[size],),
                    f"{names[size]} ({value}) must be at most {LARGEST_BLOCK}: kernels and caches hold whole blocks. "
                    f"Set e.g. {names[size]}=32.",
                )
        if self.w > _LARGEST_WINDOW:
            yield BrokenRule(
                (names.w,),
                f"{names.w} ({self.w}) must be at most {_LARGEST_WINDOW}: positions are 32-bit numbers. Set e.g. "
                f"{names.w}=512.",
            )
        if self.l % self.d:
            undivided = [size for size in ("l", "l_sel") if getattr(self, size) % self.d]
            sizes = " and ".join(f"{names[size]} ({getattr(self, size)})" for size in undivided)
            both = gcd(self.l, self.l_sel)
            strides = (stride for stride in range(1, min(both, LARGEST_BLOCK) + 1) if both % stride == 0)
            yield BrokenRule(
                (names.d, *(names[size] for size in undivided)),
                f"{names.d} ({self.d}) must divide {sizes}: block scores map to selection blocks in whole strides. Set "
                f"e.g. {names.d}={min(strides, key=lambda stride: abs(stride - self.d))}.",
            )
        elif self.l_sel % self.d:
            yield BrokenRule(
                (names.d, names.l_sel),
                f"{names.d} ({self.d}) must divide {names.l_sel} ({self.l_sel}): selection blocks begin where "
                f"compression blocks do. Set e.g. {names.l_sel}={-(-self.l_sel // self.d) * self.d}.",
            )
        if not FORCED_BLOCKS <= self.n_sel <= MOST_BLOCKS:
            limit = f"at least {FORCED_BLOCKS}: the first block and two local blocks are always among the selected ones"
            if self.n_sel > MOST_BLOCKS:
                limit = f"at most {MOST_BLOCKS}: every query stores the numbers of its blocks"
            fix = f"Set e.g. {names.n_sel}=16."
            yield BrokenRule((names.n_sel,), f"{names.n_sel} ({self.n_sel}) must be {limit}. {fix}")

    @property
    def ints(self) -> list[int]:
        """The sizes as plain integers, for a custom operator's schema; `from_ints` undoes it."""
        return [self.l, self.d, self.l_sel, self.n_sel, self.w]

    @staticmethod
    def from_ints(ints: Sequence[int]) -> "Geometry":
        """Validated once for each set of sizes: operators call this at every step."""
        return _from_ints(*ints)

    def n_compressed(self, n_tokens: int) -> int:
        """Complete compressed blocks in the first n_tokens tokens."""
        return max(0, (n_tokens - self.l) // self.d + 1)

    def n_blocks(self, n_tokens: int) -> int:
        """Selection blocks that the first n_tokens tokens touch; the last may be partial."""
        return -(-n_tokens // self.l_sel)

    def n_selected_tokens(self, n_tokens: int) -> int:
        """Tokens in the chosen blocks of the query that is token number n_tokens."""
        whole_blocks = min(self.n_sel, self.n_blocks(n_tokens)) - 1
        return whole_blocks * self.l_sel + (n_tokens - 1) % self.l_sel + 1

    def reads(self, n_tokens: int) -> int:
        """Keys that token number n_tokens (position n_tokens − 1) reads in all three branches of one kv group."""
        return min(self.w, n_tokens) + self.n_compressed(n_tokens) + self.n_selected_tokens(n_tokens)

    def total_reads(self, n_tokens: int) -> dict[str, int]:
        """Sum over the first n_tokens queries of the keys each reads in one kv group, per branch, in closed form."""
        full_windows = max(0, n_tokens - self.w)
        strides, rest = divmod(max(0, n_tokens - self.l + 1), self.d)
        everything = min(n_tokens, self.n_sel * self.l_sel)  # queries so early that all blocks are chosen
        blocks, partial = divmod(n_tokens - everything, self.l_sel)
        return {
            "sliding": _triangle(n_tokens - full_windows) + full_windows * self.w,
            "compressed": self.d * _triangle(strides) + rest * (strides + 1),
            "selected": _triangle(everything)
            + (n_tokens - everything) * (self.n_sel - 1) * self.l_sel
            + blocks * _triangle(self.l_sel)
            + _triangle(partial),
        }

    def total_merged_reads(self, n_tokens: int) -> dict[str, int]:
        """Sum the keys that queries of a `merged` layer read: blocks are chosen among the tokens before the window."""
        return {**self.total_reads(max(0, n_tokens - self.w)), "sliding": self.total_reads(n_tokens)["sliding"]}


def _require_sizes(*sizes: int) -> None:
    unchecked = object.__new__(Geometry)
    for size, value in zip(fields(Geometry), sizes, strict=True):
        object.__setattr__(unchecked, size.name, value)
    require_rules(unchecked.broken_rules())


# As `nsa.kernels.interface.constant_when_traced`, which needs torch: sizes that are written inside a compiled function
# are checked while it is traced.
_require_sizes._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass(frozen=True, kw_only=True)
class CoarseConfig:
    """The second level of the compressed branch, for very long rows."""

    coarse_block: int = option(
        0,
        "Second level of the compressed branch, for 256k tokens and more: compressed entries per coarse block. A query "
        "scores coarse blocks and reads the entries of the best n_coarse instead of all.", unit="entries, 0 = off",
        at_least=0, because="it counts entries",
    )  # fmt: skip
    n_coarse: int = option(
        16, "Coarse blocks that a query reads, including the first and two local ones.", unit="blocks", at_least=1
    )

    @property
    def level(self) -> "CoarseLevel | None":
        return CoarseLevel(self.coarse_block, self.n_coarse) if self.coarse_block else None

    def broken_rules(self, g: Geometry, names: OptionNames = ARGUMENT_NAMES) -> Iterator[BrokenRule]:
        entries, n_blocks = self.coarse_block, self.n_coarse
        if entries > LARGEST_BLOCK:
            yield BrokenRule(
                (names.coarse_block,),
                f"{names.coarse_block} ({entries}) must be at most {LARGEST_BLOCK}: kernels hold whole blocks. Set "
                f"e.g. {names.coarse_block}=64.",
            )
        if n_blocks < FORCED_BLOCKS:
            yield BrokenRule(
                (names.n_coarse,),
                f"{names.n_coarse} ({n_blocks}) must be at least {FORCED_BLOCKS}: the first coarse block and two local "
                f"ones are always read. Set e.g. {names.n_coarse}={CoarseConfig.n_coarse}.",
            )
        if not entries:
            return
        unit = lcm(g.l_sel, g.d) // g.d
        if entries % unit or entries * g.d < g.l:
            yield BrokenRule(
                (names.coarse_block, names.d, names.l_sel, names.l),
                f"{names.coarse_block} ({entries}) times {names.d} ({g.d}) must be a multiple of {names.l_sel} "
                f"({g.l_sel}) and at least {names.l} ({g.l}): coarse blocks consist of whole selection blocks. Set "
                f"e.g. {names.coarse_block}={-(-max(entries, -(-g.l // g.d)) // unit) * unit}.",
            )
        elif n_blocks * entries * g.d < g.n_sel * g.l_sel:
            yield BrokenRule(
                (names.n_coarse, names.coarse_block, names.n_sel),
                f"{names.n_coarse} ({n_blocks}) coarse blocks of {names.coarse_block} ({entries}) entries hold "
                f"{n_blocks * entries * g.d // g.l_sel} selection blocks, and {names.n_sel} ({g.n_sel}) of them are "
                f"selected. Set e.g. {names.n_coarse}={-(-g.n_sel * g.l_sel // (entries * g.d))}.",
            )


@dataclass(frozen=True)
class CoarseLevel:
    """Coarse blocks of `entries` compressed entries, of which a query reads the best `n_blocks`."""

    entries: int
    n_blocks: int
    geometry: Geometry = field(init=False, compare=False)
    """Block sizes on the axis of compressed entries: there a coarse block is compressed, and selected, as one."""

    def __post_init__(self) -> None:
        m = self.entries
        object.__setattr__(self, "geometry", Geometry(m, m, m, self.n_blocks, m))

    @property
    def ints(self) -> list[int]:
        return [self.entries, self.n_blocks]

    @staticmethod
    def from_ints(ints: Sequence[int]) -> "CoarseLevel":
        return _coarse_from_ints(*ints)

    def total_reads(self, geometry: Geometry, n_tokens: int) -> dict[str, int]:
        """Sum over the first n_tokens queries of the coarse keys that each scores and the entries that it reads."""
        strides, rest = divmod(max(0, n_tokens - geometry.l + 1), geometry.d)
        of_whole, of_rest = self.geometry.total_reads(strides), self.geometry.total_reads(strides + 1)
        return {
            "coarse": geometry.d * of_whole["compressed"] + rest * (of_rest["compressed"] - of_whole["compressed"]),
            "compressed": geometry.d * of_whole["selected"] + rest * (of_rest["selected"] - of_whole["selected"]),
        }


_from_ints = lru_cache(Geometry)
_coarse_from_ints = lru_cache(CoarseLevel)


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


def default_ffn_dim(dim: int) -> int:
    """8/3 of the model dim (as many parameters as a plain feed-forward of 4·dim), rounded up to a multiple of 64."""
    return -(-8 * dim // (3 * _FFN_MULTIPLE)) * _FFN_MULTIPLE
