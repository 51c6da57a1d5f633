"""`PagedForCausalLM`: the language model as vLLM runs it, on flat tokens of many requests.

Blocks and attention are those of `nsa.model` and `nsa.core`, built for a tensor-parallel rank's share of the heads.

N tokens of a step · D model dim
"""

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import AutoWeightsLoader

from nsa.core.layer_pattern import layer_config
from nsa.core.rope import RotaryEmbedding, Tables
from nsa.errors import CheckpointError, ConfigError
from nsa.hf.configuration import NSAConfig
from nsa.kernels.choice_text import kernels_text, slow_kernels_warning
from nsa.model.llama_block_nsa import FeedForward
from nsa.options import RopeLayer
from nsa.vllm.attention import PagedAttention
from nsa.vllm.step import StepBuffers

_log = logging.getLogger("vllm.nsa")
_SPLIT_BY_COLUMN = ("attention.w_out.weight", "feed_forward.w2.weight")
_SPLIT_BY_ROW = (
    *("attention.w_q.", "attention.w_k.", "attention.w_v.", "attention.gates.proj."),
    *("feed_forward.w1.", "feed_forward.w3.", "attention.phi_k.", "attention.phi_v."),
)


def split_axis(name: str) -> int | None:
    """The axis of a parameter that tensor parallelism divides; None: every rank has all of it."""
    if any(part in name for part in _SPLIT_BY_COLUMN) or ".pos_emb" in name:
        return 1
    return 0 if any(part in name for part in _SPLIT_BY_ROW) else None


def load_share(
    parameter: nn.Parameter, loaded: Tensor, *, name: str, axis: int | None, rank: int, n_ranks: int
) -> None:
    """Copy a rank's share of a loaded tensor, which must have exactly the shape of all shares together."""
    want = list(parameter.shape)
    if axis is not None:
        want[axis] *= n_ranks
    if list(loaded.shape) != want:
        raise CheckpointError(
            f"{name} has shape {list(loaded.shape)} in the weight files and the config needs {want}: the files are of "
            f"another model, or damaged. Export the checkpoint again with `nsa export hf`."
        )
    size = 0 if axis is None else parameter.shape[axis]
    parameter.data.copy_(loaded if axis is None else loaded.narrow(axis, rank * size, size))


class PagedBlock(nn.Module):
    """`LlamaBlockNSA` of a rank, over page streams."""

    def __init__(
        self, config: NSAConfig, prefix: str, buffers: StepBuffers, n_ranks: int, rope: RopeLayer = "scaled"
    ) -> None:
        super().__init__()
        self.post_norm = config.post_norm
        dim = config.hidden_size
        layer = layer_config(config.attention_config(), "nsa", rope)
        share = dict(n_heads=config.num_attention_heads // n_ranks, n_kv_groups=config.num_key_value_heads // n_ranks)
        self.n_ranks = n_ranks
        self.attention_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.attention = PagedAttention(
            layer.changed(**share),
            prefix=f"{prefix}.attention",
            buffers=buffers,
            n_ranks=n_ranks,
        )
        self.feed_forward_norm = nn.RMSNorm(dim, eps=config.rms_norm_eps)
        self.feed_forward = FeedForward(dim, _feed_forward_dim(config) // n_ranks, config.ffn_bias)

    def forward(self, x_ND: Tensor, tables: Tables) -> Tensor:
        if self.post_norm:
            x_ND = x_ND + self.attention_norm(self.attention(x_ND, tables))
            return x_ND + self.feed_forward_norm(self._fed_forward(x_ND))
        x_ND = x_ND + self.attention(self.attention_norm(x_ND), tables)
        return x_ND + self._fed_forward(self.feed_forward_norm(x_ND))

    def _fed_forward(self, x_ND: Tensor) -> Tensor:
        made_ND = self.feed_forward(x_ND)
        return made_ND if self.n_ranks == 1 else tensor_model_parallel_all_reduce(made_ND)


class PagedModel(nn.Module):
    """Embedding, blocks and final norm."""

    def __init__(self, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config: NSAConfig = vllm_config.model_config.hf_config
        n_ranks = get_tensor_model_parallel_world_size()
        _check_layers(config)
        _check_ranks(config, n_ranks)
        device = vllm_config.device_config.device
        buffers = StepBuffers(vllm_config.scheduler_config.max_num_seqs, config.l // config.d - 1, device)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            PagedBlock(config, f"{prefix}.layers.{i}", buffers, n_ranks, rope)
            for i, rope in enumerate(config.layer_ropes())
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x_ND: Tensor, positions_N: Tensor) -> Tensor:
        wide, tables = torch.promote_types(x_ND.dtype, torch.float32), {}
        for layer in self.layers:
            rotary: RotaryEmbedding = layer.attention.layer.rotary  # type: ignore[assignment,union-attr]
            if rotary.key not in tables:
                tables[rotary.key] = rotary.tables(positions_N[None], wide)
            x_ND = layer(x_ND, tables[rotary.key])
        return self.norm(x_ND)


class PagedForCausalLM(nn.Module):
    """Model that vLLM's registry knows as NSAForCausalLM. Methods and their arguments are those that vLLM calls."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        _check_settings(vllm_config)
        self.config: NSAConfig = vllm_config.model_config.hf_config
        self.model = PagedModel(vllm_config, prefix=f"{prefix}.model" if prefix else "model")
        self.lm_head = ParallelLMHead(self.config.vocab_size, self.config.hidden_size)
        if self.config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(self.config.vocab_size)
        ranks = dict(rank=get_tensor_model_parallel_rank(), n_ranks=get_tensor_model_parallel_world_size())
        for name, parameter in self.model.layers.named_parameters():
            load = partial(load_share, name=f"model.layers.{name}", axis=split_axis(name), **ranks)
            parameter.weight_loader = load  # type: ignore[attr-defined]
        self._choose_kernels(vllm_config.device_config.device, vllm_config.model_config.dtype)

    def _choose_kernels(self, device: torch.device, dtype: torch.dtype) -> None:
        """Choose and check the kernels now, not at the first request; KernelUnavailable if a named one cannot run."""
        block: PagedBlock = self.model.layers[0]  # type: ignore[assignment]
        choices = block.attention.layer.plan(device, dtype).choices
        _log.info("kernels: %s", kernels_text(choices))
        if warning := slow_kernels_warning(choices, device.type):
            _log.warning("%s", warning)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        x_ND = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        return self.model(x_ND, positions)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights)


def _feed_forward_dim(config: NSAConfig) -> int:
    assert config.intermediate_size is not None, "NSAConfig sets it"
    return config.intermediate_size


def _check_layers(config: NSAConfig) -> None:
    if others := sorted({*config.layer_kinds()} - {"nsa"}):
        raise ConfigError(
            f"the model has layers of other attention than NSA ({', '.join(others)}), whose keys this plugin does not "
            f"page. Serve it with `nsa serve`."
        )
    if config.coarse_block:
        raise ConfigError(
            f"the model has a second level of compressed attention (coarse_block {config.coarse_block}), which the "
            f"paged kernels do not compute. Serve it with `nsa serve`."
        )


def _check_ranks(config: NSAConfig, n_ranks: int) -> None:
    if n_ranks > 1 and (config.qk_norm_per == "layer" or config.ffn_bias):
        raise ConfigError(
            f"the model has qk_norm_per {config.qk_norm_per} and ffn_bias {config.ffn_bias}: a norm over all heads and "
            f"biases of the feed-forward are computed by one rank only, and there are {n_ranks}. Start vLLM with "
            f"--tensor-parallel-size 1."
        )
    if config.num_key_value_heads % n_ranks or _feed_forward_dim(config) % n_ranks:
        raise ConfigError(
            f"the model has {config.num_key_value_heads} kv groups and a feed-forward dimension of "
            f"{config.intermediate_size}: {n_ranks} ranks must divide both, because a rank has whole groups. Start "
            f"vLLM with a --tensor-parallel-size that does."
        )


def _check_settings(vllm_config: VllmConfig) -> None:
    """Refuse what would be computed wrongly."""
    if vllm_config.cache_config.cache_dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ConfigError(
            f"a KV cache of {vllm_config.cache_config.cache_dtype} was requested: pages hold keys and values in the "
            f"model's dtype. Start vLLM without --kv-cache-dtype."
        )
    if (method := vllm_config.model_config.quantization) is not None:
        raise ConfigError(
            f"quantization {method!r} was requested: the layers of this plugin hold their weights as the files do, and "
            f"would run unquantised. Start vLLM without --quantization, on a folder without quantization_config."
        )
    if vllm_config.parallel_config.decode_context_parallel_size > 1:
        raise ConfigError("decode context parallelism was requested: selection needs all blocks of a request.")
    if vllm_config.speculative_config is not None and vllm_config.scheduler_config.async_scheduling:
        raise ConfigError(
            "speculative decoding together with asynchronous scheduling was requested: lengths are not known on the "
            "host then. Start vLLM with --no-async-scheduling."
        )
