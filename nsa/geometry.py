"""NSA block sizes (l, d, l_sel, n_sel, w): validation, block counts, keys read per token; default feed-forward width.

Needs no torch, so that configuration and planning can use it too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import gcd, lcm

from nsa.errors import BrokenRule, require_rules

N_COARSE = 16
"""Default of `nsa.n_coarse`."""
FORCED_BLOCKS = 3  # the first block and the two nearest the query are always selected
_FFN_MULTIPLE = 64
_LARGEST_WINDOW = 2**31 - 1
_LARGEST_BLOCK = 2**16
_MOST_BLOCKS = 2**16


def broken_rules(l: int, d: int, l_sel: int, n_sel: int, w: int) -> Iterator[BrokenRule]:
    """Every validation rule that these sizes break."""
    for name, value in (("l", l), ("d", d), ("l_sel", l_sel), ("w", w)):
        if value < 1:
            yield BrokenRule(
                (f"nsa.{name}",),
                f"nsa.{name} ({value}) must be at least 1: it counts tokens. Set e.g. nsa.{name}=32.",
            )
    for name, value in (("l", l), ("d", d), ("l_sel", l_sel)):
        if value > _LARGEST_BLOCK:
            yield BrokenRule(
                (f"nsa.{name}",),
                f"nsa.{name} ({value}) must be at most {_LARGEST_BLOCK}: kernels and caches hold whole blocks. Set "
                f"e.g. nsa.{name}=32.",
            )
    if w > _LARGEST_WINDOW:
        yield BrokenRule(
            ("nsa.w",),
            f"nsa.w ({w}) must be at most {_LARGEST_WINDOW}: positions are 32-bit numbers. Set e.g. nsa.w=512.",
        )
    if d >= 1 and l >= 1 and l % d:
        yield BrokenRule(
            ("nsa.d", "nsa.l"),
            f"nsa.d ({d}) must divide nsa.l ({l}): block scores map to selection blocks in whole strides. "
            f"Set e.g. nsa.d={gcd(d, l)}.",
        )
    if d >= 1 and l_sel >= 1 and l_sel % d:
        yield BrokenRule(
            ("nsa.d", "nsa.l_sel"),
            f"nsa.d ({d}) must divide nsa.l_sel ({l_sel}): selection blocks begin where compression blocks do. "
            f"Set e.g. nsa.l_sel={-(-l_sel // d) * d}.",
        )
    if n_sel < FORCED_BLOCKS:
        yield BrokenRule(
            ("nsa.n_sel",),
            f"nsa.n_sel ({n_sel}) must be at least {FORCED_BLOCKS}: the first block and two local blocks are always "
            f"among the selected ones. Set e.g. nsa.n_sel=16.",
        )
    elif n_sel > _MOST_BLOCKS:
        yield BrokenRule(
            ("nsa.n_sel",),
            f"nsa.n_sel ({n_sel}) must be at most {_MOST_BLOCKS}: every query stores the numbers of its blocks. Set "
            f"e.g. nsa.n_sel=16.",
        )


@dataclass(frozen=True)
class Geometry:
    """Compressed blocks of `l` tokens every `d`; `n_sel` selected blocks of `l_sel` tokens; a window of `w` tokens.

    The defaults are the paper's, and the only place where they are written.
    """

    l: int = 32
    d: int = 16
    l_sel: int = 64
    n_sel: int = 16
    w: int = 512

    def __post_init__(self) -> None:
        require_rules(broken_rules(**vars(self)))

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
        """The same of a layer of kind `merged`, whose blocks are chosen among the tokens before the window."""
        return {**self.total_reads(max(0, n_tokens - self.w)), "sliding": self.total_reads(n_tokens)["sliding"]}


def broken_coarse_rules(entries: int, n_blocks: int, l: int, d: int, l_sel: int, n_sel: int) -> Iterator[BrokenRule]:
    """Rules of `nsa.coarse_block` (0: no second level) and `nsa.n_coarse`."""
    if entries < 0:
        yield BrokenRule(
            ("nsa.coarse_block",), f"nsa.coarse_block ({entries}) must be at least 0: it counts entries. Set e.g. 64."
        )
    elif entries > _LARGEST_BLOCK:
        yield BrokenRule(
            ("nsa.coarse_block",),
            f"nsa.coarse_block ({entries}) must be at most {_LARGEST_BLOCK}: kernels hold whole blocks. Set e.g. 64.",
        )
    if n_blocks < FORCED_BLOCKS:
        yield BrokenRule(
            ("nsa.n_coarse",),
            f"nsa.n_coarse ({n_blocks}) must be at least {FORCED_BLOCKS}: the first coarse block and two local ones "
            f"are always read. Set e.g. nsa.n_coarse={N_COARSE}.",
        )
    if entries < 1 or d < 1 or l_sel < 1:
        return
    unit = lcm(l_sel, d) // d
    if entries % unit or entries * d < l:
        yield BrokenRule(
            ("nsa.coarse_block", "nsa.d", "nsa.l_sel", "nsa.l"),
            f"nsa.coarse_block ({entries}) times nsa.d ({d}) must be a multiple of nsa.l_sel ({l_sel}) and at least "
            f"nsa.l ({l}): coarse blocks consist of whole selection blocks. Set e.g. "
            f"nsa.coarse_block={-(-max(entries, -(-l // d)) // unit) * unit}.",
        )
    elif n_blocks * entries * d < n_sel * l_sel:
        yield BrokenRule(
            ("nsa.n_coarse", "nsa.coarse_block", "nsa.n_sel"),
            f"nsa.n_coarse ({n_blocks}) coarse blocks of nsa.coarse_block ({entries}) entries hold "
            f"{n_blocks * entries * d // l_sel} selection blocks, and nsa.n_sel ({n_sel}) of them are selected. Set "
            f"e.g. nsa.n_coarse={-(-n_sel * l_sel // (entries * d))}.",
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
