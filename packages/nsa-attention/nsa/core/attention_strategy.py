"""`AttentionStrategy`: what a layer attends to between its projections. There is one per kind of layer.

B batch · S tokens · G kv groups · R heads per group · K key dim
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Self

import torch
from torch import Tensor

from nsa.core.attention_config import AttentionConfig
from nsa.core.block_selection import CompressedScores
from nsa.core.branches import ATTENTION_PARTS, BRANCH_ORDER, AttendedKeys, BranchesOutput
from nsa.core.kv_cache import LayerCache
from nsa.core.positions import QuerySample
from nsa.core.probe import Probe, count_reads
from nsa.geometry import Geometry
from nsa.kernels.interface import TokenDecoder
from nsa.kernels.registry import BackendRequest, KernelPlan, KernelShape, plan


class AttentionStrategy(ABC):
    """What the queries of a layer attend to.

    branches: those that a layer of this kind has, of BRANCH_ORDER.
    """

    cache_type: ClassVar[type[LayerCache]] = LayerCache

    def __init__(
        self,
        shape: KernelShape,
        kernels: BackendRequest,
        selection: CompressedScores,
        branches: tuple[str, ...] = BRANCH_ORDER,
    ) -> None:
        self.shape, self.kernels, self.selection, self.branches = shape, kernels, selection, branches
        self.geometry = shape.geometry

    @classmethod
    def of_config(cls, config: AttentionConfig, kernels: BackendRequest, branches: tuple[str, ...]) -> Self:
        """The strategy of a layer."""
        c = config
        shape = KernelShape(c.n_kv_groups, c.n_heads // c.n_kv_groups, c.d_k, c.d_v, c.geometry)
        selection = CompressedScores(c.geometry, c.d_k**-0.5, c.coarse.level, c.selector.blocks)
        return cls(shape, kernels, selection, branches)

    @classmethod
    def own_config(cls, config: AttentionConfig) -> AttentionConfig:
        """The config of a layer of this kind, from that which all layers of a model share."""
        return config

    def shared_streams(self, config: AttentionConfig) -> tuple[bool, bool]:
        """Whether a cache holds the window's and the compressed branch's raw keys and values in the selected branch's
        pages. So it does with a window that nothing reads."""
        shared = config.kv == "shared"
        return shared or "sliding" not in self.branches, shared and config.compression.rotated == "before"

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return self.selection.options["scale"]

    @property
    def selects(self) -> bool:
        """Whether the layer chooses blocks, and so has compressed keys."""
        return "selected" in self.branches

    def plan(self, device: torch.device, dtype: torch.dtype, geometry: Geometry | None = None) -> KernelPlan:
        """The backend that computes each branch there, and why. geometry: default the layer's."""
        shape = self.shape if geometry is None else self.shape._replace(geometry=geometry)
        return plan(self.kernels, device, dtype, shape)

    def plan_coarse(self, q_BSGRK: Tensor) -> KernelPlan | None:
        """The backends for the second level of compressed keys; None without one."""
        coarse = self.selection.coarse
        return None if coarse is None else self.plan(q_BSGRK.device, q_BSGRK.dtype, coarse.geometry)

    def visible(self, keys: AttendedKeys) -> AttendedKeys:
        """The keys with the positions up to which each branch sees them: the query's own, unless a kind differs."""
        return keys

    @abstractmethod
    def attend(
        self, run: KernelPlan, q_BSGRK: Tensor, gates_BSGR3: Tensor | None, keys: AttendedKeys
    ) -> BranchesOutput:
        """Attend to keys that `visible` returned. run: the backends of `plan`."""

    def decoder_maker(self, run: KernelPlan) -> Callable[..., TokenDecoder] | None:
        """Makes a backend's fused step for one new token per row; None if there is none."""
        return None

    def selector_loss(
        self, run: KernelPlan, sample: QuerySample, q_BSGRK: Tensor, k_BCGK: Tensor, output: BranchesOutput,
        keys: AttendedKeys,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the selector loss of a layer that selects, and its plain mean over queries. k_BCGK: the compressed
        keys, which alone have a gradient."""
        return self.selection.loss(sample, q_BSGRK, k_BCGK, output, keys)

    def record(
        self, probe: Probe, gates: Tensor | None, gate_kind: str, blocks: Tensor | None, keys: AttendedKeys
    ) -> None:
        """Give a probe what was read."""
        assert blocks is not None
        options = self.geometry, self.branches, self.selection.coarse
        reads_BSG = count_reads(blocks, *keys, *options)
        pos_BS, own_BS = keys[1].pos_BS, keys[2].pos_BS
        probe.record(gates, blocks, pos_BS, reads_BSG, *options, window_pos_BS=own_BS, gate_kind=gate_kind)

    def flops(self, seq_len: int) -> dict[str, float]:
        """Forward FLOPs per token of ATTENTION_PARTS, averaged over a sequence; multiply-adds count two."""
        g, selectable = self.geometry, self.selectable(seq_len)
        totals = {**g.total_reads(selectable), "sliding": g.total_reads(seq_len)["sliding"]}
        reads = {branch: total / seq_len for branch, total in totals.items()}
        scored = reads["compressed"]
        if (coarse := self.selection.coarse) is not None:
            in_two = {part: total / seq_len for part, total in coarse.total_reads(g, selectable).items()}
            reads["compressed"], scored = in_two["compressed"], sum(in_two.values())
        n_heads = self.shape.n_kv_groups * self.shape.heads_per_group
        return {
            "select": 2 * n_heads * self.shape.d_k * scored,
            **{branch: self._flops_of(n) if branch in self.branches else 0.0 for branch, n in reads.items()},
        }

    def selectable(self, n_tokens: int) -> int:
        """Number of tokens among which the last of n_tokens tokens chooses its blocks."""
        return n_tokens

    def _flops_of(self, reads: float) -> float:
        s = self.shape
        return 2 * s.n_kv_groups * s.heads_per_group * (s.d_k + s.d_v) * reads

    def _flops_of_one_part(self, part: str, reads: float) -> dict[str, float]:
        return {**dict.fromkeys(ATTENTION_PARTS, 0.0), part: self._flops_of(reads)}
