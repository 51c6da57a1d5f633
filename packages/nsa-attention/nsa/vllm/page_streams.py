"""Page streams: the parts of a layer's KV cache as vLLM's cache manager sees them.

A stream is one kind of entries (see `nsa.core.kv_cache`): selected and compressed keys and values are kept for every
token, the window's and the compressed branch's raw ones are freed behind the last w and l tokens.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, KVCacheSpec, SlidingWindowSpec

from nsa.errors import ConfigError
from nsa.kernels.interface import KeyPages

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass
class StreamTokens:
    """A step's requests in one stream: what vLLM gives for its cache group. Of all layers the same object."""

    begins: Tensor
    """[requests + 1] on the host: where each request's new tokens begin in the step's tokens."""
    lengths: Tensor
    """[requests] on the host: tokens of each request, the new ones included."""
    table: Tensor
    """[requests, blocks per request], int32."""
    slots: Tensor
    """[tokens]: block · block size + place in it."""
    made: Any = None
    """What was computed from it for all layers (`nsa.vllm.step.PagedStep`)."""


class StreamTokensBuilder(AttentionMetadataBuilder[StreamTokens]):
    """Passes on what vLLM computes for a cache group."""

    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StreamTokens:
        batch = common_attn_metadata
        n = batch.num_reqs
        return StreamTokens(
            batch.query_start_loc_cpu[: n + 1],
            batch.seq_lens_cpu_upper_bound[:n],
            batch.block_table_tensor[:n],
            batch.slot_mapping[: int(batch.query_start_loc_cpu[n])],
        )


class PageStreamBackend(AttentionBackend):
    """Backend that vLLM asks about a stream before it allocates pages."""

    supported_dtypes = DTYPES

    @staticmethod
    def get_name() -> str:
        return "NSA_PAGES"

    @staticmethod
    def get_impl_cls() -> Any:
        raise NotImplementedError("a page stream stores keys and values; nsa.vllm.attention attends")

    @staticmethod
    def get_builder_cls() -> type[StreamTokensBuilder]:
        return StreamTokensBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Block by block, so that streams of different sizes can share a block number. With layers outermost vLLM
        would enlarge compressed blocks to the size of the others, and prefixes would be found in steps of d blocks."""
        return KVCacheLayout.BLHNC, KVCacheLayout.BLNHC


@cache
def _backend_for(l_sel: int) -> type[PageStreamBackend]:
    """The backend for blocks of whole selection blocks: vLLM asks the class, which knows no config."""

    class SelectionPages(PageStreamBackend):
        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | MultipleOf]:
            return [MultipleOf(l_sel)]

    return SelectionPages


class PageStream(nn.Module, AttentionLayerBase):
    """One stream of one layer: its spec, and the pages that vLLM binds to it.

    tokens_per_entry: 1, or the stride d of compressed entries. An entry lies where its block ends, so that what a page
        holds depends on no later token, and requests with the same beginning share pages.
    last: how many of the last tokens are needed; None: all.
    """

    def __init__(
        self,
        prefix: str,
        *,
        n_groups: int,
        d_k: int,
        d_v: int,
        l_sel: int,
        tokens_per_entry: int = 1,
        last: int | None = None,
    ) -> None:
        super().__init__()
        config = get_current_vllm_config()
        self.prefix, self.n_groups, self.d_k, self.d_v, self.l_sel = prefix, n_groups, d_k, d_v, l_sel
        self.tokens_per_entry, self.last = tokens_per_entry, last
        self.dtype = config.model_config.dtype
        self.kv_cache = torch.empty(0)
        self.generation = 0
        """Counts the allocations: addresses of an earlier one are not valid any more."""
        layers = config.compilation_config.static_forward_context
        if prefix in layers:
            raise ConfigError(f"vLLM already has a layer named {prefix!r}: every stream needs a name of its own.")
        layers[prefix] = self

    def get_attn_backend(self) -> type[PageStreamBackend]:
        return _backend_for(self.l_sel)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        size = vllm_config.cache_config.block_size
        if size % self.l_sel:
            raise ConfigError(
                f"vLLM's block size is {size}: it must be a multiple of the selection block ({self.l_sel} tokens), "
                f"because a page holds whole selection blocks. Start vLLM with --block-size {self.l_sel}."
            )
        sizes = dict(
            block_size=size, num_kv_heads=self.n_groups, head_size=self.d_k, head_size_v=self.d_v, dtype=self.dtype
        )
        if self.last is not None:
            return SlidingWindowSpec(sliding_window=self.last, **sizes)
        return FullAttentionSpec(tokens_per_state=self.tokens_per_entry, **sizes)

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        self.kv_cache = kv_cache
        self.generation += 1

    def bind_one_page(self, block_size: int, device: torch.device) -> None:
        """Bind a page of zeros, which stands for every page of a request while memory is measured."""
        sizes = (1, self.n_groups, block_size // self.tokens_per_entry, self.d_k + self.d_v)
        self.kv_cache = torch.zeros(sizes, dtype=self.dtype, device=device)

    def key_pages(self, table_BP: Tensor) -> KeyPages:
        """Pages of keys as a decoder reads them, in place."""
        return KeyPages(self.kv_cache[..., : self.d_k], self.kv_cache[..., self.d_k :], table_BP)

    def write(self, slot: tuple[Tensor, Tensor], k_NGK: Tensor, v_NGV: Tensor) -> None:
        """Store entries. slot: blocks and places in them, [N] each."""
        block_N, place_N = slot
        self.kv_cache[block_N, :, place_N] = torch.cat((k_NGK, v_NGV), -1).to(self.dtype)

    def entries(self, slot: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of single entries: [..., G, K] and [..., G, V]."""
        block, place = slot
        both = self.kv_cache[block, :, place]
        return both[..., : self.d_k], both[..., self.d_k :]

    def rows(self, blocks_P: Tensor, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the entries from `begin` to `end` of consecutive blocks: [1, T, G, K] and [1, T, G, V]."""
        both_PGtX = self.kv_cache.index_select(0, blocks_P)
        both_1TGX = both_PGtX.transpose(1, 2).flatten(0, 1)[None, begin:end]
        return both_1TGX[..., : self.d_k], both_1TGX[..., self.d_k :]
