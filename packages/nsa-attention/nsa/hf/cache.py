"""Transformers' cache of one layer, over the `LayerCache` of `nsa.core.kv_cache`.

Importing this module registers the classes: `DynamicCache(config=…)` and `StaticCache(config=…)` then make these
layers. The attention never calls `Cache.update`: the model takes each layer's `LayerCache` and gives it to
`NSAAttention`.

B batch · S columns of one forward pass
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, StaticLayer

from nsa.core.kv_cache import LayerCache
from nsa.core.nsa_attention import NSAAttention
from nsa.errors import ConfigError
from nsa.hf.configuration import LAYER_TYPE

_log = logging.getLogger(__name__)
GRAPH_DEVICES = ("cuda",)
_SHORTEST_REWIND = 64
_LONGEST_REWIND = 1024  # of the columns of one forward pass, the prompt's included, that can be cropped afterwards
_SPARE_TOKENS = 64


class TokenGraph:
    """The pass of one new token per row as a CUDA graph: captured once, replayed for every later token.

    Kernels read lengths from the caches' own tensors, which each pass advances; on the host tokens are counted here.
    run: hidden states to hidden states, over these caches.
    """

    def __init__(self, run: Callable[[Tensor], Tensor], x_B1D: Tensor, caches: Sequence[LayerCache]) -> None:
        self._caches, self._graph = list(caches), torch.cuda.CUDAGraph()
        with torch.inference_mode(False):  # later passes may not be in that mode
            self._x_B1D = torch.empty_like(x_B1D)
        self._counted = True  # by `run`, which is captured for the first token to be replayed
        before = [cache.counted for cache in self._caches]
        try:
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._out_B1D = run(self._x_B1D)
        except RuntimeError:  # of CUDA: what was captured did not run
            for cache, counted in zip(self._caches, before, strict=True):
                cache.counted = counted
            raise

    def fits(self, x_B1D: Tensor, caches: Sequence[LayerCache]) -> bool:
        """Whether it was captured for such a token over these very caches."""
        same = all(mine is theirs for mine, theirs in zip(self._caches, caches, strict=True))
        return same and (x_B1D.shape, x_B1D.dtype, x_B1D.device) == (
            self._x_B1D.shape, self._x_B1D.dtype, self._x_B1D.device,
        )  # fmt: skip

    def replay(self, x_B1D: Tensor) -> Tensor:
        if not self._counted:
            for cache in self._caches:
                cache.count_token()
        self._counted = False
        self._x_B1D.copy_(x_B1D)
        self._graph.replay()
        return self._out_B1D.clone()


class NSACacheLayer(CacheLayerMixin):
    """A cache that is allocated at the first forward pass, for `reserve`d tokens if that was called, and then grows.

    Transformers counts columns of the batch, padding included; `LayerCache` counts each row's real tokens.
    """

    _layer_type = LAYER_TYPE
    is_compileable = False
    is_croppable: ClassVar[bool] = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.record_past = False
        self._cache: LayerCache | None = None
        self._reserved = 0
        self._columns = 0
        self._padding: list[tuple[int, Tensor]] = []  # first column and real_BS of each forward pass with padding
        self._graph: TokenGraph | None = None
        self._capture: Literal["later", "next", "never"] = "later"

    def reserve(self, max_len: int) -> None:
        """Set how many tokens will be needed, if known: an allocation takes as many at least."""
        self._reserved = max_len

    def open(self, attention: NSAAttention, batch: int, n_new: int, like: Tensor | None = None) -> LayerCache:
        """The cache with room for n_new more tokens per row; `like` as for `NSAAttention.new_cache`."""
        needed, rewind = self._columns + n_new, 0
        if self.record_past:
            rewind = max(_SHORTEST_REWIND, 1 << (min(n_new, _LONGEST_REWIND) - 1).bit_length())
        if self._cache is None:
            max_len = self._reserved if self._reserved >= needed else self._grown_length(needed)
            self._cache = attention.new_cache(batch, max_len, rewind, like=like)
            self.is_initialized = True
        elif needed > self._cache.max_len or rewind > self._cache.rewind:
            enough = needed <= self._cache.max_len
            self._cache = self._cache.grown(0 if enough else self._grown_length(needed), rewind)
        return self._cache

    def run_token(
        self, run: Callable[[Tensor], Tensor], x_B1D: Tensor, caches: Sequence[LayerCache], repeats: Callable[[], bool]
    ) -> Tensor:
        """Run one new token per row through all layers: as written for the first token after a prompt, which compiles
        the kernels; then, if its pass `repeats`, from a CUDA graph."""
        if self._graph is not None:
            if self._graph.fits(x_B1D, caches):
                return self._graph.replay(x_B1D)
            self.forget_graph()
        if self._capture == "later" or (self._capture == "next" and not repeats()):
            self._capture = "next"
        elif self._capture == "next":
            try:
                self._graph = TokenGraph(run, x_B1D, caches)
            except RuntimeError as error:  # of CUDA
                _log.warning("decoding is slower than it could be: no CUDA graph of a token could be made (%s)", error)
                self._capture = "never"
            else:
                return self._graph.replay(x_B1D)
        return run(x_B1D)

    def forget_graph(self) -> None:
        """Capture anew after the next token: weights and modules may be others from one prompt to the next."""
        self._graph, self._capture = None, "later"

    def _grown_length(self, needed: int) -> int:
        return max(self._reserved, needed + needed // 4 + _SPARE_TOKENS)

    def advance(self, n_new: int, real_BS: Tensor | None) -> None:
        """Count the columns of a forward pass; `real_BS` says which are tokens, default all."""
        if real_BS is not None:
            self._padding.append((self._columns, real_BS))
        self._columns += n_new

    @property
    def batch_size(self) -> int:
        if self._cache is None:
            raise AttributeError("the cache has no rows before its first forward pass")
        return self._cache.batch

    def get_seq_length(self) -> int:
        return self._columns

    def get_max_length(self) -> int:
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._columns + query_length, 0

    def reset(self) -> None:
        if self._cache is not None:
            self._cache.reset()
        self._columns, self._padding = 0, []

    def activate_past_recording(self) -> None:
        """From now on `crop` can remove the columns of the last forward pass, whatever its length up to 1,024."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last columns, counted as a negative number; a positive one is the number of columns to keep."""
        keep = tokens_to_remove if tokens_to_remove > 0 else self._columns + tokens_to_remove
        keep = max(0, keep)
        if self._cache is None or keep >= self._columns:
            return
        removed_B = torch.full_like(self._cache.length_B, self._columns - keep)
        for first, real_BS in self._padding:
            removed_B -= (~real_BS[:, max(0, keep - first) :]).sum(1)
        self._cache.crop(self._cache.length_B - removed_B)
        self._columns = keep
        self._padding = [(first, real_BS[:, : keep - first]) for first, real_BS in self._padding if first < keep]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self._cache is not None:
            self._cache.reorder(beam_idx.to(self._cache.device))
            self._pick_padding(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self._cache is not None:
            self.batch_select_indices(torch.arange(self._cache.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        if self._cache is not None:
            rows_B = torch.arange(self._cache.batch, device=self._cache.device)[indices.to(self._cache.device)]
            self._cache = self._cache.picked(rows_B)
            self._pick_padding(rows_B)

    def _pick_padding(self, rows_B: Tensor) -> None:
        self._padding = [(first, real_BS[rows_B.to(real_BS.device)]) for first, real_BS in self._padding]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> NoReturn:
        raise _no_key_states()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        raise _no_key_states()

    def offload(self) -> NoReturn:
        raise ConfigError(OFFLOADING_REFUSED)

    prefetch = offload


class NSAStaticCacheLayer(NSACacheLayer, StaticLayer):
    """`cache_implementation="static"`: allocated once for `max_cache_len` tokens; more are refused.

    Not compileable in Transformers' sense: `generate` would compile the model by itself, and torch.compile cannot trace
    the decoders of the backends, which are faster.
    """

    _layer_type = LAYER_TYPE

    def __init__(self, max_cache_len: int, **kwargs: Any) -> None:
        super().__init__(max_cache_len=max_cache_len, **kwargs)
        self._reserved = max_cache_len

    def reserve(self, max_len: int) -> None:
        """Nothing: the length is given."""

    def _grown_length(self, needed: int) -> int:
        raise ConfigError(
            f"the static cache holds {self.max_cache_len} tokens and {needed} are needed. Make it with "
            f"max_cache_len={needed} or more, or leave cache_implementation out."
        )

    def get_max_length(self) -> int:
        return self.max_cache_len


OFFLOADING_REFUSED = (
    "an offloaded cache was requested: NSA's layers keep their keys and values on the device of the weights and are "
    "not moved by Transformers. Leave cache_implementation out (the default cache grows), or use 'static'."
)


def cache_layers(cache: Cache, n_layers: int) -> list[NSACacheLayer]:
    """The layers of a cache; one that was made without a config gets them here."""
    if cache.offloading:
        raise ConfigError(OFFLOADING_REFUSED)
    if not cache.layers:
        cache.layers.extend(NSACacheLayer() for _ in range(n_layers))
    if len(cache.layers) != n_layers or not all(isinstance(layer, NSACacheLayer) for layer in cache.layers):
        kinds = sorted({type(layer).__name__ for layer in cache.layers})
        raise ConfigError(
            f"the cache has {len(cache.layers)} layers ({', '.join(kinds)}) and the model {n_layers} of NSA: it is of "
            f"another model. Make it with DynamicCache(config=model.config), or leave past_key_values out."
        )
    return cache.layers


def _no_key_states() -> ConfigError:
    return ConfigError(
        "keys and values were passed to a cache of NSA: its three branches keep their own. Run the model with "
        "past_key_values instead."
    )
