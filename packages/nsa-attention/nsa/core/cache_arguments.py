"""Checks of what a KV cache is given: new tokens, lengths, row numbers."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from nsa.core.branches import BranchStreams
from nsa.errors import ConfigError

_INTEGERS = (torch.int64, torch.int32)


class CacheSizes(Protocol):
    batch: int
    n_groups: int
    d_k: int
    d_v: int
    device: torch.device


def check_new_tokens(new: BranchStreams, cache: CacheSizes) -> None:
    """Refuse tokens that are not for this cache."""
    batch, n_new = new.k_sel.shape[:2]
    k_shape, v_shape = (batch, n_new, cache.n_groups, cache.d_k), (batch, n_new, cache.n_groups, cache.d_v)
    if batch != cache.batch or [x.shape for x in new] != [k_shape, v_shape] * 3:
        raise ConfigError(
            f"the cache holds {cache.batch} rows, {cache.n_groups} groups, keys of {cache.d_k} and values of "
            f"{cache.d_v}, and was given keys and values of shapes {[list(x.shape) for x in new]}. Make one with "
            f"the same module's new_cache({batch}, …)."
        )
    if any(x.device != cache.device for x in new):
        raise ConfigError(
            f"the cache is on {cache.device} and was given keys and values on {sorted({str(x.device) for x in new})}. "
            f"Move them there."
        )
    if n_new < 1:
        raise ConfigError(
            "a forward pass with a cache got 0 new tokens: there is nothing to append. Pass at least one."
        )


def checked_lengths(new_lens_B: Tensor, n_new: int, cache: CacheSizes) -> Tensor:
    """The number of real tokens per row, none negative and none above the number of new tokens."""
    if new_lens_B.shape != (cache.batch,) or new_lens_B.dtype not in _INTEGERS:
        raise ConfigError(
            f"new_lens_B is {new_lens_B.dtype} of shape {list(new_lens_B.shape)}: it is how many of the {n_new} "
            f"new tokens are real in each of the cache's {cache.batch} rows. Pass int64 of shape [{cache.batch}]."
        )
    if new_lens_B.device != cache.device:
        raise ConfigError(f"new_lens_B is on {new_lens_B.device} and the cache on {cache.device}. Move it there.")
    # On an accelerator reading the values would stall it; cut to what fits, no value can write elsewhere.
    if new_lens_B.is_cpu and not torch.compiler.is_compiling():
        if not all(0 <= n <= n_new for n in new_lens_B.tolist()):
            raise ConfigError(
                f"new_lens_B is {new_lens_B.tolist()[:8]} and {n_new} tokens are new: 0 to {n_new} of them are "
                f"real in each row. Pass that number per row."
            )
        return new_lens_B
    return new_lens_B.clamp(0, n_new)


def checked_rows(method: str, rows: Sequence[int] | Tensor, cache: CacheSizes, count: int | None = None) -> Tensor:
    """Numbers of the cache's rows, as many as `count` says."""
    index_B = torch.as_tensor(rows if isinstance(rows, Tensor) else list(rows), device=cache.device)
    if not index_B.numel() and index_B.dim() == 1:
        index_B = index_B.long()
    count = index_B.numel() if count is None else count
    if index_B.shape != (count,) or index_B.dtype not in _INTEGERS:
        raise ConfigError(
            f"{method} was given {index_B.dtype} of shape {list(index_B.shape)}: it needs the old row of each of "
            f"{count} rows. Pass int64 of shape [{count}]."
        )
    if not all(0 <= row < cache.batch for row in index_B.tolist()):
        raise ConfigError(f"{method} was given rows {index_B.tolist()[:8]} and the cache has 0 to {cache.batch - 1}.")
    return index_B


def lengths_per_row(length: int | Sequence[int] | Tensor, batch: int) -> list[int]:
    lengths = length.tolist() if isinstance(length, Tensor) else length
    rows = list(lengths) if isinstance(lengths, Sequence) else [lengths] * batch
    if len(rows) != batch or not all(isinstance(n, int) for n in rows):
        raise ConfigError(f"crop was given {length!r}: it needs a length, or one for each of {batch} rows.")
    return rows
