"""Activation memory estimate, tensor by tensor.

This is the only list of the tensors that a forward pass saves for backward. The attention operators save the same ones
with every backend (`nsa.kernels.ops`); backends differ in their temporary memory, `workspace_bytes`. Numbers are bytes
for one rank's forward pass of B rows of S tokens. tests/planning/test_activations.py compares them with an allocator.

D model dim · F feed-forward dim · V vocabulary, or value dim of a head · H heads · G kv groups · K key dim
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nsa.attention_rules import kind_counts, kv_streams
from nsa.config.schema import RunConfig
from nsa.core.layer_kinds import LAYER_CLASSES
from nsa.kernels.portable.chunk import CPU_ELEMENTS, OTHER_ELEMENTS
from nsa.kernels.portable.key_windows import PIECE as WINDOW_PIECE
from nsa.kernels.portable.selected import UNION_FACTOR
from nsa.kernels.triton import PIECE, QUERIES_OF_SLOTS, SLOT_BYTES
from nsa.model.build import wanted_kernels
from nsa.options import AttentionKind, Checkpointing

FP32 = 4
INT32, INT64 = 4, 8


@dataclass(frozen=True)
class ForwardPass:
    """Shape and precision of one rank's forward pass."""

    rows: int
    seq_len: int
    vocab_size: int
    autocast: bool
    """Weights in fp32, cast to bf16 at each use; otherwise used in the dtype they are gathered in."""
    width: int
    """Bytes per number in the compute precision: 2 for bf16, 4 for fp32."""
    on_gpu: bool

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len

    @property
    def stream_width(self) -> int:
        """Bytes per number of the residual stream: under autocast it starts and stays in fp32."""
        return FP32 if self.autocast else self.width


@dataclass(frozen=True)
class ActivationMemory:
    """Peak bytes in addition to weights, gradients and optimizer states."""

    kept: int
    """Without gradient checkpointing: the saved tensors of every block."""
    selective: int
    """As `recomputed`, and the results of the attention operators of all blocks."""
    recomputed: int
    """With full gradient checkpointing: the inputs of all blocks, and the tensors of one recomputed block."""
    workspace: int
    """Part of all three: temporary memory of the attention kernels."""

    def peak(self, gradient_checkpointing: Checkpointing) -> int:
        return {"off": self.kept, "selective": self.selective, "full": self.recomputed}[gradient_checkpointing]


def activations(
    config: RunConfig, one: ForwardPass, linear_weights: Mapping[AttentionKind, int], head_weights: int
) -> ActivationMemory:
    """Peak memory of a pass. `linear_weights`: weights of one block's matrix products, by the kind of its attention;
    `head_weights`: of the head.

    The peak is at one of three points: the loss, the backward pass of the last block's feed-forward, or that of its
    attention. Which one depends on the vocabulary and the widths. With several kinds of layers the last is taken to be
    of the largest.
    """
    layers = config.model.n_layers
    counts = kind_counts(config.model.attention, layers)
    blocks = {kind: _BlockTensors(config, one, kind) for kind in counts}
    casts = {kind: one.width * linear_weights[kind] if one.autocast else 0 for kind in counts}
    head_casts = one.width * head_weights if one.autocast else 0
    saved = {kind: block.saved() + casts[kind] for kind, block in blocks.items()}
    results = {kind: block.operator_results() for kind, block in blocks.items()}
    workspace = workspace_bytes(config, one)
    head, logits = _head(config, one) + head_casts, one.tokens * one.vocab_size
    # Forward: logits, the same in fp32, log-probabilities. Backward: log-probabilities and two gradients of them.
    loss_forward, loss_backward = logits * (one.width + 2 * FP32), logits * 3 * FP32
    during = {
        kind: max(block.feed_forward_backward(), block.attention_backward(workspace)) for kind, block in blocks.items()
    }

    def of_all(by_kind: Mapping[AttentionKind, int]) -> int:
        return sum(count * by_kind[kind] for kind, count in counts.items())

    shared = one.tokens * (FP32 * config.model.d_k + 2 * INT64)  # of all blocks: RoPE tables, positions and starts
    inputs = shared + layers * one.tokens * config.model.dim * one.stream_width
    all_casts = of_all(casts)  # autocast keeps them until it ends, after the loss and before the backward pass
    loss = max(all_casts + head + loss_forward, head + loss_backward)
    return ActivationMemory(
        kept=shared + of_all(saved) + max(head + loss_forward, head + loss_backward, *during.values()),
        selective=inputs + of_all(results) + max(loss, *(saved[k] - results[k] + during[k] for k in counts)),
        recomputed=inputs + max(loss, *(saved[kind] + during[kind] for kind in counts)),
        workspace=workspace,
    )


class _BlockTensors:
    """Sizes of the tensors of one block, whose attention is of this kind, in bytes."""

    def __init__(self, config: RunConfig, one: ForwardPass, kind: AttentionKind) -> None:
        model, nsa, geometry = config.model, config.nsa, config.nsa.geometry
        self.one, self.phi, self.after = one, nsa.phi, nsa.rope_compressed == "after"
        self.dim, self.ffn, self.n_sel, self.l = model.dim, model.ffn_size, geometry.n_sel, geometry.l
        self.keys, self.values = model.n_heads * model.d_k, model.n_heads * model.d_v
        self.heads, self.groups, self.d_k, self.d_v = model.n_heads, model.n_kv_groups, model.d_k, model.d_v
        self.blocks = geometry.n_compressed(one.seq_len)
        self.gates = self.heads if nsa.gate_per == "head" else self.groups
        branches = LAYER_CLASSES[kind].branches
        self.branches, self.selects = len(branches), "selected" in branches
        self.selector_loss = nsa.selector_loss > 0 and self.selects
        self.qk_norm = model.qk_norm
        self.key_streams, self.value_streams = (min(n, self.branches) for n in kv_streams(nsa.kv))
        self.raw_branches = min(self.key_streams, sum(branch in branches for branch in ("selected", "sliding")))

    def saved(self) -> int:
        """Saved by the forward pass for the backward pass."""
        readers = 4 if self.selects else 3  # queries, keys, values, and gates
        per_token = self._norm(readers) + self._attention() + self._norm(readers=2) + self._feed_forward()
        per_row = self._compressed() + (self._selector_loss() if self.selector_loss else 0)
        return self.one.tokens * per_token + self.one.rows * per_row + self.operator_results()

    def operator_results(self) -> int:
        """What the attention operators return: part of `saved`."""
        width = self.one.width
        per_branch = width * self.values + FP32 * self.heads  # output and log-sum-exp
        if not self.selects:
            return self.one.tokens * per_branch
        chosen_and_mixed = INT32 * self.groups * self.n_sel + width * self.values
        return self.one.tokens * (self.branches * per_branch + chosen_and_mixed)

    def feed_forward_backward(self) -> int:
        """In addition to `saved` during the backward pass of the feed-forward, after its last product is freed."""
        width = self.one.width
        cast = width * self.dim if self.one.autocast else 0
        gradients = self.one.stream_width * self.dim + cast + 3 * width * self.ffn
        return self.one.tokens * (gradients - width * self.ffn)

    def attention_backward(self, workspace: int) -> int:
        """In addition to `saved` during the backward pass of the attention, after the feed-forward's is freed."""
        width = self.one.width
        gradients = (
            self.one.stream_width * self.dim
            + (FP32 * self.values if self.selects else 0)  # of the mixed branches
            + width * self.values  # of one branch at a time
            + 2 * width * self.keys  # of the queries: from this branch, and from those before it
            + (FP32 + width) * self.groups * (self.d_k + self.d_v)  # of keys and values, summed in fp32
        )
        freed = self._norm(readers=2) + self._feed_forward() + width * self.values
        return max(0, self.one.tokens * (gradients - freed) + workspace)

    def _norm(self, readers: int) -> int:
        """Input and normalised input in fp32, and the output: once, or cast for each product that reads it."""
        width = self.one.width
        outputs = readers * width if self.one.autocast else width
        return 2 * FP32 * self.dim + FP32 + outputs * self.dim

    def _attention(self) -> int:
        width = self.one.width
        return (
            width * self.keys  # q
            + self.raw_branches * width * self.groups * self.d_k  # k of the selected and the sliding branch
            + width * self.groups * self.value_streams * self.d_v  # v of all branches is one tensor
            + (self._qk_norm(self.heads + self.groups * self.key_streams) if self.qk_norm else 0)
            + (3 * FP32 * self.gates if self.selects else 0)
        )

    def _qk_norm(self, heads: int) -> int:
        """Input and normalised input in fp32, and a scale per head; a fused kernel on a GPU saves less."""
        return 2 * FP32 * heads * self.d_k + FP32 * heads

    def _compressed(self) -> int:
        """Per row: the compressed keys and values, and what making them saves."""
        if not self.selects:
            return 0
        made = self.one.width * self.groups * (self.d_k + self.d_v)
        scores = self.one.seq_len * (self._token_scores(self.d_k) + self._token_scores(self.d_v))
        return scores + self.blocks * (made + self._phi(self.d_k, self.after) + self._phi(self.d_v, False))

    def _token_scores(self, channels: int) -> int:
        """Of one token, for φ that weighs tokens by a score: the factors of its product, one a wider copy of the token
        unless that is wide already."""
        if self.phi != "softmax":
            return 0
        factors = 1 if self.one.width >= FP32 else 2
        return factors * FP32 * self.groups * channels

    def _phi(self, channels: int, rotated: bool) -> int:
        """Of one block: its tokens' indices, and what φ and a rotation after it save."""
        width, per_block = self.one.width, INT64 * self.l + (FP32 * self.d_k if rotated else 0)
        if self.phi != "avg":
            per_block += width * self.l * self.groups * channels  # the gathered tokens
        if self.phi == "softmax":
            per_block += INT64 * self.l + (FP32 + width) * self.l * self.groups  # the shares, and a cast of them
        if self.phi == "mlp":
            per_block += 2 * width * self.groups * 2 * channels  # before and after the GELU
        return per_block

    def _selector_loss(self) -> int:
        """Per row: the compressed keys made once more, of a cast of the same hidden states if they are the branch's
        own, and their gradient."""
        per_token = self._token_scores(self.d_k)
        if self.key_streams > 1:
            per_token += self.one.width * self.dim if self.one.autocast else 0
            per_token += self._qk_norm(self.groups * self.key_streams) if self.qk_norm else 0
        gradient = self.one.width * self.groups * self.d_k
        return self.one.seq_len * per_token + self.blocks * (gradient + self._phi(self.d_k, self.after))

    def _feed_forward(self) -> int:
        return 4 * self.one.width * self.ffn


def _head(config: RunConfig, one: ForwardPass) -> int:
    """Saved by the last norm and the head, and the ids and labels."""
    return one.tokens * (2 * FP32 * config.model.dim + FP32 + one.width * config.model.dim + 2 * INT64)


def workspace_bytes(config: RunConfig, one: ForwardPass) -> int:
    """Largest temporary memory of the kernels that will run: the backward pass of the selected branch, if any."""
    if not {"nsa", "global"} & {*config.model.attention}:
        return _packed_keys(config, one)
    if not one.on_gpu and wanted_kernels(config).selected in ("auto", "cpu"):
        return _packed_keys(config, one)
    if one.on_gpu and wanted_kernels(config).selected == "triton":
        return _slots(config, one)
    return _window_pieces(config, one) if one.on_gpu else _portable_workspace(config, one)


def _packed_keys(config: RunConfig, one: ForwardPass) -> int:
    """Compiled CPU kernels: two packed fp32 copies of one branch's keys and values, and their gradients in fp32."""
    model = config.model
    return 3 * FP32 * one.tokens * model.n_kv_groups * (model.d_k + model.d_v)


def _slots(config: RunConfig, one: ForwardPass) -> int:
    """Triton kernels: the partial result of every query and selected block, which may overlap two windows of keys, and
    fp32 gradients of the windows: one sum per window, and one more for every PIECE of its readers."""
    model, geometry = config.model, config.nsa.geometry
    queries = one.tokens * model.n_heads * model.d_k * one.width
    slots = one.tokens * model.n_heads * 2 * geometry.n_sel * max(model.d_k, model.d_v) * one.width
    share = min(1.0, max(SLOT_BYTES, QUERIES_OF_SLOTS * queries) / slots)  # of the queries, processed in chunks
    windows = one.rows * model.n_kv_groups * geometry.n_blocks(one.seq_len)
    sums = windows + int(share * one.tokens * model.n_kv_groups * geometry.n_sel * 2) // PIECE
    return int(share * slots) + sums * geometry.l_sel * (model.d_k + model.d_v) * FP32


def _window_pieces(config: RunConfig, one: ForwardPass) -> int:
    """Portable kernels on a GPU: queries and their gradients copied for each window of keys that they chose, scores and
    their gradients, and keys and values of each piece, with theirs. All in fp32, two entries per choice (packed)."""
    model, geometry = config.model, config.nsa.geometry
    widths, l_sel = model.d_k + model.d_v, geometry.l_sel
    per_query = 2 * geometry.n_sel * model.n_kv_groups
    largest = per_query * (model.n_heads // model.n_kv_groups) * max(model.d_k, model.d_v, l_sel)
    entries = min(one.tokens, max(one.rows, OTHER_ELEMENTS // largest)) * per_query
    pieces = entries // WINDOW_PIECE + one.rows * model.n_kv_groups * geometry.n_blocks(one.seq_len)
    rows = pieces * WINDOW_PIECE * (model.n_heads // model.n_kv_groups)
    return FP32 * (rows * (widths + model.d_k + 2 * l_sel) + 2 * pieces * l_sel * widths)


def _portable_workspace(config: RunConfig, one: ForwardPass) -> int:
    """Portable kernels on a CPU.

    Either the union of the blocks selected by a chunk of queries, with scores and their gradients, or for each query a
    copy of its own keys and values, with their gradients. This depends on the data, so the larger one is returned.
    """
    model, geometry = config.model, config.nsa.geometry
    budget = CPU_ELEMENTS
    chosen = geometry.n_sel * geometry.l_sel
    queries = min(one.seq_len, max(1, budget // (one.rows * model.n_heads * chosen)))
    n_blocks = geometry.n_blocks(one.seq_len)
    union = min(n_blocks, UNION_FACTOR * geometry.n_sel) * geometry.l_sel
    shared = one.rows * queries * union * (2 * FP32 * model.n_heads + 3 * model.n_kv_groups)
    if n_blocks <= UNION_FACTOR * geometry.n_sel:
        return shared
    copied = min(queries, max(1, 4 * budget // (one.rows * model.n_kv_groups * chosen * model.d_k)))
    keys = one.rows * copied * model.n_kv_groups * chosen
    # Copies and their gradients; with several chunks, the next copies exist before the previous ones are freed.
    generations = 2 if copied == one.seq_len else 3
    return max(shared, keys * (generations * FP32 * (model.d_k + model.d_v) + INT64))
