"""Functional NSA on plain tensors: `nsa_attention` and its branches, with projections and RoPE left to the caller.

`block_sparse_attention` reads blocks that anything else chose, such as a learned indexer.

Tensors are [batch, tokens, heads, width], as in FlashAttention. Head h attends over the keys of group h // (H / G).
`cu_seqlens` packs documents: cumulative lengths, int32 [n + 1], rows of the batch end to end; documents do not see each
other. Everything is differentiable in queries, keys, values and gates, by autograd and `torch.func.grad`, and compiles
without graph breaks; vmap, forward mode and double backward need kernels="reference".

The layout of F.scaled_dot_product_attention, [batch, heads, tokens, width], is refused where another argument shows it:
fewer groups than heads, or gates, blocks or `cu_seqlens` of the tokens. With as many groups as heads and none of these
(gates that broadcast, a branch alone), tokens and heads cannot be told apart.

B batch · S queries · T tokens · H query heads · G kv groups · R heads per group (H / G) · K key dim · V value dim
C compressed entries · N chosen blocks · X gates per group (R or 1)
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from nsa.core.branches import BRANCH_ORDER, BranchKeys
from nsa.core.compression import mean_of_blocks
from nsa.core.layer_kinds import ThreeBranches
from nsa.core.positions import DocumentLayout, packed_layout, plain_layout
from nsa.errors import ConfigError
from nsa.geometry import FORCED_BLOCKS, LARGEST_BLOCK, MOST_BLOCKS, Geometry
from nsa.kernels.precision import require_one_dtype
from nsa.kernels.reference import Attended
from nsa.kernels.registry import KernelPlan, KernelShape, RequestedKernels, backend_request

_DEFAULT_GEOMETRY = Geometry()  # the paper's
_LARGEST_SCALE = torch.finfo(torch.float32).max

BranchTensors = Tensor | Mapping[str, Tensor] | Sequence[Tensor | None]
"""One tensor for all branches, or one per branch: a mapping with the names of BRANCH_ORDER, or three in that order."""
CuSeqlens = Tensor | Sequence[int] | None


class AttentionOptions(TypedDict, total=False):
    """Keyword arguments of each branch's function, with the meaning and the defaults that they have in
    `nsa_attention`."""

    geometry: Geometry
    scale: float | None
    cu_seqlens: CuSeqlens
    kernels: RequestedKernels


class BranchLse(NamedTuple):
    """Natural-log log-sum-exps of the scores each query saw: [B, S, H], fp32; −inf where a query sees nothing."""

    compressed: Tensor
    selected: Tensor
    sliding: Tensor


class NSAOutput(NamedTuple):
    """Result of `nsa_attention` with return_lse or return_blocks."""

    out: Tensor
    """[B, S, H, V]."""
    lse: BranchLse | None
    blocks: Tensor | None
    """int32 [B, S, G, N], ascending, numbered from the beginning of the query's document, −1 past the last."""


def nsa_attention(
    q_BSHK: Tensor,
    k: BranchTensors,
    v: BranchTensors,
    gates_BSH3: Tensor,
    *,
    geometry: Geometry = _DEFAULT_GEOMETRY,
    compressed: tuple[Tensor, Tensor] | None = None,
    scale: float | None = None,
    cu_seqlens: CuSeqlens = None,
    blocks: Tensor | None = None,
    kernels: RequestedKernels = "auto",
    return_lse: bool = False,
    return_blocks: bool = False,
) -> Tensor | NSAOutput:
    """Native Sparse Attention: compressed, selected and sliding attention mixed by gates. Returns [B, S, H, V].

    k, v: [B, T, G, K] and [B, T, G, V], one for all branches or one per branch (see `BranchTensors`). Rotate queries
        and keys before the call. Queries are the last S of the T tokens, e.g. one token against the keys of a cache;
        with cu_seqlens T = S.
    gates: [B, S, H, 3] or broadcastable to it, in BRANCH_ORDER; mixing is done in fp32.
    compressed: keys and values of the compressed branch as [B, C, G, K] and [B, C, G, V], made by the caller; their
        order is that of `compress_blocks`. Default: the mean of each block of the compressed branch's k and v.
    scale: of the scores; default 1 / sqrt(K).
    blocks: chosen blocks to attend to instead of selecting, as the indices of `block_sparse_attention`.
    kernels: a backend's name, or a name per branch; 'auto' takes the one of NSA_KERNEL, else the fastest that can run.
    return_lse, return_blocks: return an `NSAOutput` with each branch's log-sum-exps and the chosen blocks.
    """
    k_cmp, k_sel, k_win = _per_branch("k", k, compressed is not None)
    v_cmp, v_sel, v_win = _per_branch("v", v, compressed is not None)
    batch = _QueryBatch(q_BSHK, k_sel, geometry, scale, cu_seqlens, kernels, per_token=True)
    if compressed is None:
        assert k_cmp is not None
        assert v_cmp is not None
        raw_k, raw_v, *_ = batch.raw_keys("compressed", k_cmp, v_cmp)
        compressed = batch.means(raw_k), batch.means(raw_v)
    gates = batch.gates(gates_BSH3)
    keys = (
        batch.entries(*compressed),
        batch.raw_keys("selected", k_sel, v_sel),
        batch.raw_keys("sliding", k_win, v_win),
    )
    given_blocks = None if blocks is None else batch.blocks(blocks)
    output = batch.strategy(v_sel).attend(batch.plan(v_sel), batch.q_BSGRK, gates, keys, given_blocks)
    assert output.blocks is not None
    out = batch.by_head(output.out)
    if not return_lse and not return_blocks:
        return out
    lse = BranchLse(*(batch.by_head(x) for x in output.lse)) if return_lse else None
    return NSAOutput(out, lse, batch.by_row(output.blocks) if return_blocks else None)


def compressed_attention(
    q_BSHK: Tensor, k_BCGK: Tensor, v_BCGV: Tensor, *, return_lse: bool = False, **options: Unpack[AttentionOptions]
) -> Attended:
    """Attend to the compressed entries (see `compress_blocks`) whose last token is not after the query: [B, S, H, V].

    A query that sees no complete block gets zeros (log-sum-exp −inf). options: geometry, scale, cu_seqlens, kernels.
    """
    batch = _QueryBatch(q_BSHK, k_BCGK, **options)
    return batch.attend("compressed", batch.entries(k_BCGK, v_BCGV), return_lse)


def select_blocks(q_BSHK: Tensor, k_BCGK: Tensor, **options: Unpack[AttentionOptions]) -> Tensor:
    """Top-n block selection by the compressed branch's probabilities: int32 [B, S, G, n_sel], ascending, −1 padded.

    The first block and the two nearest the query are always among them; ties go to the lower index. No gradient.
    options: geometry, scale, cu_seqlens, kernels.
    """
    batch = _QueryBatch(q_BSHK, k_BCGK, **options)
    k, _, pos, first = batch.entries(k_BCGK, k_BCGK)
    select, scoring = batch.plan(k_BCGK).functions.select, batch.strategy(k_BCGK).options
    return batch.by_row(select(batch.q_BSGRK, k, pos, first, **scoring))


def selected_attention(
    q_BSHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    blocks_BSGN: Tensor,
    *,
    return_lse: bool = False,
    **options: Unpack[AttentionOptions],
) -> Attended:
    """Attend to the tokens of the given blocks of `l_sel` tokens that are not after the query: [B, S, H, V]. Queries
    are the last S of the T tokens.

    blocks: as the indices of `block_sparse_attention`. options: geometry, scale, cu_seqlens, kernels.
    """
    batch = _QueryBatch(q_BSHK, k_BTGK, **options, per_token=True)
    keys = batch.raw_keys("selected", k_BTGK, v_BTGV)
    return batch.attend("selected", keys, return_lse, batch.blocks(blocks_BSGN))


def block_sparse_attention(
    q_BSHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    block_indices_BSGN: Tensor,
    *,
    block_size: int,
    cu_seqlens: CuSeqlens = None,
    scale: float | None = None,
    kernels: RequestedKernels = "auto",
    return_lse: bool = False,
) -> Attended:
    """Attend to the tokens of chosen blocks that are not after the query: [B, S, H, V], with exact gradients.
    Queries are the last S of the T tokens.

    block_indices: integers [B, S, G, N], or [B, S, 1, N] where all heads of a token read the same blocks, in any order.
        Block j is tokens j · block_size to (j + 1) · block_size − 1 of the query's own document. Entries below 0 are
        ignored, a block that is named twice is read once, and of a block that lies after the query, wholly or in part,
        only tokens up to the query are read. A query that reads nothing gets zeros, and −inf as its log-sum-exp.
    block_size: any number of tokens from 1 on.
    scale: of the scores; default 1 / sqrt(K).
    kernels: as for `nsa_attention`; a backend that cannot read so many blocks is refused with the reason.
    return_lse: also return the log-sum-exps of the scores, natural logarithm, fp32 [B, S, H]; they have gradients too.
    """
    n_blocks = block_indices_BSGN.shape[-1] if block_indices_BSGN.dim() else 0
    _require_block_sizes(block_size, n_blocks)
    geometry = Geometry(l=1, d=1, l_sel=block_size, n_sel=max(FORCED_BLOCKS, n_blocks), w=1)
    return selected_attention(
        q_BSHK, k_BTGK, v_BTGV, block_indices_BSGN, return_lse=return_lse, geometry=geometry, scale=scale,
        cu_seqlens=cu_seqlens, kernels=kernels,
    )  # fmt: skip


def sliding_attention(
    q_BSHK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, *, return_lse: bool = False, **options: Unpack[AttentionOptions]
) -> Attended:
    """Attend to the query's own token and the w − 1 before it: [B, S, H, V]. Queries are the last S of the T tokens.

    options: geometry, scale, cu_seqlens, kernels.
    """
    batch = _QueryBatch(q_BSHK, k_BTGK, **options, per_token=True)
    return batch.attend("sliding", batch.raw_keys("sliding", k_BTGK, v_BTGV), return_lse)


def compress_blocks(x_BSGX: Tensor, *, geometry: Geometry = _DEFAULT_GEOMETRY, cu_seqlens: CuSeqlens = None) -> Tensor:
    """Mean-pool keys or values into the compressed branch's entries: blocks of `l` tokens with stride `d`.

    Returns [B, C, G, X] with C = geometry.n_compressed(S); with `cu_seqlens` [1, C, G, X], the documents' blocks one
    after the other, C = geometry.n_compressed(B · S) whatever is packed (entries past the last block are not used).
    """
    if x_BSGX.dim() != 4:
        raise ConfigError(
            f"keys or values have shape {list(x_BSGX.shape)}: they must be [batch, tokens, groups, width]."
        )
    batch, length = x_BSGX.shape[:2]
    layout = _layout(batch, length, geometry, x_BSGX.device, cu_seqlens)
    rows = x_BSGX if cu_seqlens is None else x_BSGX.flatten(0, 1)[None]
    return mean_of_blocks(rows, layout.begin_BC, geometry.l, geometry.d)


class _QueryBatch:
    """Queries as the kernels take them, where they stand, and the way back to the caller's layout."""

    def __init__(
        self,
        q_BSHK: Tensor,
        k_BTGK: Tensor,
        geometry: Geometry = _DEFAULT_GEOMETRY,
        scale: float | None = None,
        cu_seqlens: CuSeqlens = None,
        kernels: RequestedKernels = "auto",
        *,
        per_token: bool = False,
    ) -> None:
        """per_token: k has one key per token, of which the queries may be the last only; else one per block."""
        for name, x in (("q", q_BSHK), ("k", k_BTGK)):
            if x.dim() != 4:
                raise ConfigError(f"{name} has shape {list(x.shape)}: it must be [batch, tokens, heads, width].")
        if not q_BSHK.is_floating_point():
            raise ConfigError(f"q is {q_BSHK.dtype}: attention computes with floating-point numbers. Cast q, k and v.")
        n_batch, length, n_heads, d_k = q_BSHK.shape
        self.n_groups = k_BTGK.shape[2]
        self._shapes = q_BSHK.shape, k_BTGK.shape
        if self.n_groups < 1 or n_heads < 1 or n_heads % self.n_groups:
            raise ConfigError(
                f"q has {n_heads} heads and k {self.n_groups} groups: every group has the same number of heads. Pass "
                f"queries of a multiple of {max(1, self.n_groups)} heads.{self._sdpa_hint()}"
            )
        n_tokens = k_BTGK.shape[1] if per_token and cu_seqlens is None else length
        if n_tokens < length:
            raise ConfigError(
                f"q has {length} tokens and k {n_tokens}: queries are the last of the tokens that have keys. Pass at "
                f"least as many keys as queries.{self._sdpa_hint()}"
            )
        self.geometry, self.packed, self.shape = geometry, cu_seqlens is not None, (n_batch, length)
        self.key_shape = n_batch, n_tokens
        self.kernels = backend_request(kernels)
        self.d_k, self.scale = d_k, _checked_scale(scale, d_k)
        try:
            self.layout = _layout(n_batch, n_tokens, geometry, q_BSHK.device, cu_seqlens, length)
        except ConfigError as error:
            raise ConfigError(f"{error}{self._sdpa_hint()}") from None
        self.q_BSGRK = self.rows(q_BSHK).unflatten(2, (self.n_groups, -1))

    def strategy(self, v: Tensor) -> ThreeBranches:
        shape = KernelShape(self.n_groups, self.q_BSGRK.shape[3], self.d_k, v.shape[-1], self.geometry)
        return ThreeBranches(shape, self.kernels, self.scale)

    def plan(self, v: Tensor) -> KernelPlan:
        return self.strategy(v).plan(self.q_BSGRK.device, self.q_BSGRK.dtype)

    def rows(self, x: Tensor) -> Tensor:
        """The caller's [B, S, …] as the kernels take it: packed documents are one row."""
        return x.flatten(0, 1)[None] if self.packed else x

    def by_row(self, x: Tensor) -> Tensor:
        """The way back."""
        return x.view(*self.shape, *x.shape[2:]) if self.packed else x

    def by_head(self, x: Tensor) -> Tensor:
        """[B, S, G, R, …] → [B, S, H, …]."""
        return self.by_row(x.flatten(2, 3))

    def attend(self, branch: str, keys: BranchKeys, return_lse: bool, *blocks: Tensor) -> Attended:
        """One branch, in the caller's layout."""
        k, v, *places = keys
        run, options = getattr(self.plan(v).functions, branch), self.strategy(v).options
        result = run(self.q_BSGRK, k, v, *blocks, *places, **options, return_lse=return_lse)
        if not return_lse:
            return self.by_head(result)
        out, lse = result
        return self.by_head(out), self.by_head(lse)

    def raw_keys(self, branch: str, k_BTGK: Tensor, v_BTGV: Tensor) -> BranchKeys:
        """One key and value per token."""
        self._check_keys(branch, k_BTGK, v_BTGV, self.key_shape)
        return BranchKeys(self.rows(k_BTGK), self.rows(v_BTGV), self.layout.pos_BS, self.layout.start_BS)

    def entries(self, k_BCGK: Tensor, v_BCGV: Tensor) -> BranchKeys:
        """One key and value per compressed block."""
        layout = self.layout
        self._check_keys("compressed", k_BCGK, v_BCGV, tuple(layout.begin_BC.shape))
        return BranchKeys(k_BCGK, v_BCGV, layout.pos_BS, layout.first_BS)

    def means(self, x_BSGX: Tensor) -> Tensor:
        """Compressed entries of rows."""
        return mean_of_blocks(x_BSGX, self.layout.begin_BC, self.geometry.l, self.geometry.d)

    def gates(self, gates_BSH3: Tensor) -> Tensor:
        """[B, S, G, R, 3], fp32 or wider."""
        n_heads = self.n_groups * self.q_BSGRK.shape[3]
        want = (*self.shape, n_heads, len(BRANCH_ORDER))
        shape = gates_BSH3.shape
        if len(shape) > 4 or any(a not in (b, 1) for a, b in zip(reversed(shape), reversed(want), strict=False)):
            raise ConfigError(
                f"gates have shape {list(shape)}: one number per token, head and branch ({', '.join(BRANCH_ORDER)}) is "
                f"needed. Pass {list(want)} or what broadcasts to it.{self._sdpa_hint()}"
            )
        if gates_BSH3.is_complex():
            raise ConfigError(f"gates are {gates_BSH3.dtype}: they must be real numbers.")
        wide = gates_BSH3.to(torch.promote_types(gates_BSH3.dtype, torch.float32))
        return self.rows(wide.expand(want)).unflatten(2, (self.n_groups, -1))

    def blocks(self, blocks_BSGN: Tensor) -> Tensor:
        """Ascending, each once, −1 past the last, as the kernels need it; for each group."""
        of_groups, of_all = (*self.shape, self.n_groups), (*self.shape, 1)
        shape = tuple(blocks_BSGN.shape)
        if len(shape) != 4 or shape[:3] not in (of_groups, of_all) or blocks_BSGN.is_floating_point():
            raise ConfigError(
                f"blocks are {blocks_BSGN.dtype} of shape {list(shape)}: they number the chosen blocks of each token "
                f"and group. Pass int32 of shape {[*of_groups, 'N']}, as select_blocks returns it, or of shape "
                f"{[*of_all, 'N']} for all groups.{self._sdpa_hint()}"
            )
        if not shape[3]:
            blocks_BSGN = blocks_BSGN.new_full((*shape[:3], 1), -1)
        n_rows, n_tokens = self.key_shape
        # Blocks from there on are past every query.
        none = self.geometry.n_blocks(n_rows * n_tokens if self.packed else n_tokens)
        numbers = blocks_BSGN.long()
        outside = (numbers < 0) | (numbers >= none)
        sorted_ = numbers.masked_fill(outside, none).to(torch.int32).sort(-1).values
        again = torch.nn.functional.pad(sorted_[..., 1:] == sorted_[..., :-1], (1, 0))
        sorted_ = sorted_.masked_fill(again, none).sort(-1).values
        chosen_BSGN = sorted_.masked_fill(sorted_ == none, -1).expand(-1, -1, self.n_groups, -1)
        return self.rows(chosen_BSGN.contiguous())

    def _sdpa_hint(self) -> str:
        """Advice for errors about shapes, if queries and keys look like [batch, heads, tokens, width]."""
        (_, heads, length, _), (_, groups, tokens, _) = self._shapes
        if not 0 < groups <= heads < length or heads % groups or tokens < groups:
            return ""
        return (
            f" These look like the [batch, heads, tokens, width] of F.scaled_dot_product_attention ({heads} heads, "
            f"{length} tokens): pass x.transpose(1, 2) of q, k and v."
        )

    def _check_keys(self, branch: str, k: Tensor, v: Tensor, tokens: tuple[int, ...]) -> None:
        require_one_dtype(self.q_BSGRK, k, v)
        want = (*tokens, self.n_groups)
        if k.shape != (*want, self.d_k) or v.dim() != 4 or v.shape[:3] != want:
            raise ConfigError(
                f"{branch} keys have shape {list(k.shape)} and values {list(v.shape)}: with queries for "
                f"{list(self.shape)} tokens, {self.n_groups} groups and {self.geometry} they must be "
                f"{[*want, self.d_k]} and {[*want, 'V']}.{self._sdpa_hint()}"
            )


def _require_block_sizes(block_size: int, n_blocks: int) -> None:
    if isinstance(block_size, bool) or not isinstance(block_size, int) or not 1 <= block_size <= LARGEST_BLOCK:
        raise ConfigError(
            f"block_size is {block_size!r:.80}: it counts the tokens of a block, from 1 to {LARGEST_BLOCK}. Pass e.g. "
            f"block_size=64."
        )
    if n_blocks > MOST_BLOCKS:
        raise ConfigError(
            f"block_indices name {n_blocks} blocks per query: at most {MOST_BLOCKS} are read. Pass larger blocks."
        )


def _checked_scale(scale: float | None, d_k: int) -> float:
    if d_k < 1:
        raise ConfigError("q has width 0: queries and keys need at least one channel.")
    if scale is None:
        return d_k**-0.5
    if isinstance(scale, torch.SymFloat):
        return scale
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not abs(scale) <= _LARGEST_SCALE:
        raise ConfigError(f"scale is {scale!r:.80}: scores are multiplied by it. Pass a finite number, or None.")
    return float(scale)


def _layout(
    batch: int,
    length: int,
    geometry: Geometry,
    device: torch.device,
    cu_seqlens: CuSeqlens,
    n_queries: int | None = None,
) -> DocumentLayout:
    if cu_seqlens is None:
        return plain_layout(batch, length, geometry, device, n_queries)
    return packed_layout(torch.as_tensor(cu_seqlens, device=device), batch * length, geometry, name="cu_seqlens")


def _per_branch(name: str, x: BranchTensors, entries_given: bool) -> tuple[Tensor | None, Tensor, Tensor]:
    """The tensors of BRANCH_ORDER; the first may be missing if the compressed branch's entries are given."""
    if isinstance(x, Tensor):
        return x, x, x
    if isinstance(x, Mapping):
        if unknown := set(x) - set(BRANCH_ORDER):
            raise ConfigError(f"{name} names {', '.join(map(repr, unknown))}. Branches are: {', '.join(BRANCH_ORDER)}.")
        x = [x.get(branch) for branch in BRANCH_ORDER]
    if len(x) == len(BRANCH_ORDER):
        compressed, selected, sliding = x
        if selected is not None and sliding is not None and (compressed is not None or entries_given):
            return compressed, selected, sliding
    raise ConfigError(
        f"{name} must be one tensor for all branches or one for each of {', '.join(BRANCH_ORDER)}, of which the first "
        f"may be missing only with compressed=(k, v). Pass a tensor, a mapping or three tensors in that order."
    )
