"""A Llama block with NSA, or another kind of attention. Parameters are named as in OLMo-core.

B batch · S tokens · D model dim · F feed-forward dim
"""

from typing import Any, Unpack

import torch.nn.functional as F
from torch import Tensor, nn

from nsa.core.attention_config import AttentionConfig, attention_config
from nsa.core.init import init_weights
from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import ForwardOptions
from nsa.geometry import default_ffn_dim
from nsa.kernels.registry import RequestedKernels
from nsa.options import AttentionKind


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, dim: int, ffn_dim: int, bias: bool = False) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=bias)
        self.w2 = nn.Linear(ffn_dim, dim, bias=bias)
        self.w3 = nn.Linear(dim, ffn_dim, bias=bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BSD)) * self.w3(x_BSD))


class LlamaBlockNSA(nn.Module):
    """config or attention: an `AttentionConfig`, or the width and options by name, as `NSAAttention` takes them.

    kernels: as for `NSAAttention`.
    ffn_bias: biases of the feed-forward's projections.
    post_norm: the norms are of what attention and feed-forward return, before it is added, not of what they read.
    """

    def __init__(
        self,
        config: AttentionConfig | int | None = None,
        *,
        ffn_dim: int | None = None,
        ffn_bias: bool = False,
        post_norm: bool = False,
        norm_eps: float = 1e-5,
        kind: AttentionKind = "nsa",
        kernels: RequestedKernels = "auto",
        **attention: Any,
    ) -> None:
        super().__init__()
        config = attention_config(config, **attention)
        dim = config.dim
        self.post_norm = post_norm
        self.attention_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.attention = NSAAttention(config, kind=kind, kernels=kernels)
        self.feed_forward_norm = nn.RMSNorm(dim, eps=norm_eps)
        self.feed_forward = FeedForward(dim, ffn_dim or default_ffn_dim(dim), ffn_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw initial values, as `NSAAttention.reset_parameters`."""
        init_weights(self, std=self.attention.config.init_std)

    def forward(self, x_BSD: Tensor, **options: Unpack[ForwardOptions]) -> Tensor:
        """`options` are those of `NSAAttention.forward`: cache, cu_doc_lens, attention_mask, …"""
        if self.post_norm:
            x_BSD = x_BSD + self.attention_norm(self.attention(x_BSD, **options))
            return x_BSD + self.feed_forward_norm(self.feed_forward(x_BSD))
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), **options)
        return x_BSD + self.feed_forward(self.feed_forward_norm(x_BSD))
