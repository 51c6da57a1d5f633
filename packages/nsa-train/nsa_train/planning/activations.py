"""Activation memory estimate, tensor by tensor.

This is the only list of the tensors that a forward pass saves for backward. The attention operators save the same ones
with every backend (`nsa.kernels.ops`); backends differ in their temporary memory, `workspace_bytes`. Numbers are bytes
for one rank's forward pass of B rows of S tokens. tests/nsa_train/planning/test_activations.py compares them with an
allocator.

D model dim · F feed-forward dim · V vocabulary, or value dim of a head · H heads · G kv groups · K key dim
"""

from collections.abc import Mapping
from dataclasses import dataclass

from nsa.core.layer_kinds import LAYER_KINDS
from nsa.core.layer_pattern import kind_counts
from nsa.kernels.portable.chunk import CPU_ELEMENTS, OTHER_ELEMENTS
from nsa.kernels.portable.selected import PIECE as WINDOW_PIECE
from nsa.kernels.portable.selected import UNION_FACTOR
from nsa.kernels.triton import PIECE, QUERIES_OF_SLOTS, SLOT_BYTES
from nsa.model.loss import chunk_rows
from nsa.options import SELECTING_KINDS, AttentionKind, Checkpointing
from nsa_train.config.schema import RunConfig
from nsa_train.run_model import wanted_kernels

FP32 = 4
_INT32, _INT64 = 4, 8


@dataclass(frozen=True)
class ForwardPass:
    """Shape and precision of one rank's forward pass."""

    rows: int
    seq_len: int
    """Length of whole rows, which `cp` ranks divide."""
    vocab_size: int
    autocast: bool
    """Weights in fp32, cast to bf16 at each use; otherwise used in the dtype they are gathered in."""
    width: int
    """Bytes per number in the compute precision: 2 for bf16, 4 for fp32."""
    on_gpu: bool
    tp: int = 1
    """Tensor parallelism divides heads, groups and the feed-forward's width, and outside of them the tokens."""
    cp: int = 1
    """Context parallelism divides tokens; keys that may be selected, and compressed ones, are gathered whole."""

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len // self.cp

    @property
    def gathered_tokens(self) -> int:
        """Tokens on the key axis of the selected branch."""
        return self.rows * self.seq_len

    @property
    def stream_width(self) -> int:
        """Bytes per number of the residual stream: under autocast it starts and stays in fp32."""
        return FP32 if self.autocast else self.width


@dataclass(frozen=True)
class ActivationMemory:
    """Peak bytes in addition to weights, gradients and optimizer states."""

    kept: int
    """Peak without gradient checkpointing: the saved tensors of every block."""
    selective: int
    """Peak with selective checkpointing: as `recomputed`, and the results of the attention operators of all blocks."""
    recomputed: int
    """Peak with full checkpointing: the inputs of all blocks, and the tensors of one recomputed block."""
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
    workspace = _workspace_bytes(config, one)
    head = _head(config, one) + head_casts
    loss_forward, loss_backward = _loss(config, one, head_weights)
    during = {
        kind: max(block.feed_forward_backward(), block.attention_backward(workspace)) for kind, block in blocks.items()
    }

    def of_all(by_kind: Mapping[AttentionKind, int]) -> int:
        return sum(count * by_kind[kind] for kind, count in counts.items())

    tables = FP32 * (config.model.rotary_dim or config.model.d_k) * len({*config.model.rope_layers} - {"none"})
    shared = one.tokens * (tables + 2 * _INT64)  # of all blocks: RoPE tables, positions and starts
    inputs = shared + layers * one.tokens * config.model.dim * one.stream_width // one.tp
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
        self.one, self.phi, self.after = one, config.attention.compression.operator, nsa.rope_compressed == "after"
        self.dim, self.ffn, self.n_sel, self.l = model.dim, model.ffn_size // one.tp, geometry.n_sel, geometry.l
        self.heads, self.groups = model.n_heads // one.tp, model.n_kv_groups // one.tp
        self.d_k, self.d_v = model.d_k, model.d_v
        self.keys, self.values = self.heads * model.d_k, self.heads * model.d_v
        self.blocks = geometry.n_compressed(one.seq_len)
        self.own_blocks = -(-self.blocks // one.cp)
        self.gates = self.heads if nsa.gate_per == "head" else self.groups
        strategy, branches = LAYER_KINDS[kind]
        attention = strategy.own_config(config.attention)
        self.branches, self.selects, self.gated = len(branches), "selected" in branches, "compressed" in branches
        self.windowed = "sliding" in branches and kind != "dense"
        self.keeps_index = one.on_gpu and kind == "nsa" and set(wanted_kernels(config)) == {"triton"}
        self.selector_loss = attention.selector.loss > 0 and self.selects
        self.qk_norm = model.qk_norm
        self.key_streams, self.value_streams = (min(n, self.branches) for n in attention.kv_streams)
        self.raw_branches = min(self.key_streams, sum(branch in branches for branch in ("selected", "sliding")))

    def saved(self) -> int:
        """Bytes that the forward pass saves for the backward pass."""
        readers = 4 if self.gated else 3  # queries, keys, values, and gates
        per_token = self._norm(readers) + self._attention() + self._norm(readers=2) + self._feed_forward()
        per_row = self._compressed() + (self._selector_loss() if self.selector_loss else 0)
        return self.one.tokens * per_token + self.one.rows * per_row + self.operator_results()

    def operator_results(self) -> int:
        """Bytes that the attention operators return: part of `saved`."""
        width = self.one.width
        per_branch = width * self.values + FP32 * self.heads  # output and log-sum-exp
        if not self.selects:
            return self.one.tokens * per_branch
        chosen_and_mixed = _INT32 * self.groups * self.n_sel + width * self.values
        index = self.index_bytes() if self.keeps_index else 0
        return self.one.tokens * (self.branches * per_branch + chosen_and_mixed + index)

    def index_bytes(self) -> int:
        """Bytes per token that Triton kernels keep for the backward pass: two entries of two numbers for each chosen
        block, as in packed rows; the bounds of two branches, and the last visible key."""
        return _INT32 * (4 * self.groups * self.n_sel + 5)

    def feed_forward_backward(self) -> int:
        """Bytes beyond `saved` during the backward pass of the feed-forward, after its last product is freed."""
        width = self.one.width
        cast = width * self.dim if self.one.autocast else 0
        gradients = self._stream() + cast + 3 * width * self.ffn
        return self.one.tokens * (gradients - width * self.ffn)

    def attention_backward(self, workspace: int) -> int:
        """Bytes beyond `saved` during the backward pass of the attention, after the feed-forward's are freed."""
        width = self.one.width
        gradients = (
            self._stream()
            + (FP32 * self.values if self.selects else 0)  # of the mixed branches
            + width * self.values  # of one branch at a time
            + 2 * width * self.keys  # of the queries: from this branch, and from those before it
        )
        # Of keys and values, summed in fp32; gathered ones also as they are scattered.
        of_keys = (FP32 + width) * self.groups * (self.d_k + self.d_v) * self.one.gathered_tokens
        freed = self._norm(readers=2) + self._feed_forward() + width * self.values
        return max(0, self.one.tokens * (gradients - freed) + of_keys + workspace)

    def _stream(self) -> int:
        """Gradient of the residual stream; with tensor parallelism also that of a sum over ranks before it is
        scattered."""
        own = self.one.stream_width * self.dim
        return own if self.one.tp == 1 else own // self.one.tp + self.one.width * self.dim

    def _norm(self, readers: int) -> int:
        """Input and normalised input in fp32, and the output: once, or cast for each product that reads it."""
        width = self.one.width
        outputs = readers * width if self.one.autocast else width
        return (2 * FP32 * self.dim + FP32) // self.one.tp + outputs * self.dim

    def _attention(self) -> int:
        width = self.one.width
        return (
            width * self.keys  # q
            + self._raw_keys()
            + (self._qk_norm(self.heads + self.groups * self.key_streams) if self.qk_norm else 0)
            + self._weights_of_branches()
        )

    def _weights_of_branches(self) -> int:
        """The gates; of a softmax over two branches, the shares of both and where one of them is empty."""
        if self.gated:
            return 3 * FP32 * self.gates
        return (2 * FP32 + 1) * self.heads if self.selects else 0

    def _raw_keys(self) -> int:
        """Bytes per own token: keys of the selected and the sliding branch, and values of all, which are one tensor.

        With context parallelism those of the selected branch are of all tokens and the window's are copies.
        """
        width, cp = self.one.width, self.one.cp
        if cp == 1:
            return width * self.groups * (self.raw_branches * self.d_k + self.value_streams * self.d_v)
        gathered = cp * (self.selects or not self.windowed)
        return width * self.groups * (gathered + self.windowed) * (self.d_k + self.d_v)

    def _qk_norm(self, heads: int) -> int:
        """Input and normalised input in fp32, and a scale per head; a fused kernel on a GPU saves less."""
        return 2 * FP32 * heads * self.d_k + FP32 * heads

    def _compressed(self) -> int:
        """Bytes per row for the compressed keys and values, and what making them saves; 0 where they only choose."""
        if not self.gated:
            return 0
        block_bytes = self.one.width * self.groups * (self.d_k + self.d_v)
        scores = self._own_length() * (self._token_scores(self.d_k) + self._token_scores(self.d_v))
        pooled = self._phi(self.d_k, self.after) + self._phi(self.d_v, False)
        return scores + self.blocks * block_bytes + self.own_blocks * pooled

    def _own_length(self) -> int:
        return self.one.seq_len // self.one.cp

    def _token_scores(self, channels: int) -> int:
        """Bytes per token for the scores of a φ that weighs tokens: the factors of its product, one a wider copy of the
        token unless that is wide already."""
        if not self.phi.scores_tokens:
            return 0
        factors = 1 if self.one.width >= FP32 else 2
        return factors * FP32 * self.groups * channels

    def _phi(self, channels: int, rotated: bool) -> int:
        """Bytes per block: its tokens' indices, and what φ and a rotation after it save."""
        width, per_block = self.one.width, _INT64 * self.l + (FP32 * self.d_k if rotated else 0)
        if self.phi.has_weights:
            per_block += width * self.l * self.groups * channels  # the gathered tokens
        if self.phi.scores_tokens:
            per_block += _INT64 * self.l + (FP32 + width) * self.l * self.groups  # the shares, and a cast of them
        return per_block + 2 * width * self.groups * self.phi.hidden(channels)  # before and after its activation

    def _selector_loss(self) -> int:
        """Bytes per row for the compressed keys made once more, of a cast of the same hidden states if they are the
        branch's own, and their gradient."""
        per_token = self._token_scores(self.d_k)
        if self.key_streams > 1:
            per_token += self.one.width * self.dim if self.one.autocast else 0
            per_token += self._qk_norm(self.groups * self.key_streams) if self.qk_norm else 0
        gradient = self.one.width * self.groups * self.d_k
        pooled = self.own_blocks * self._phi(self.d_k, self.after)
        return self._own_length() * per_token + self.blocks * gradient + pooled

    def _feed_forward(self) -> int:
        return 4 * self.one.width * self.ffn


def _head(config: RunConfig, one: ForwardPass) -> int:
    """Bytes that the last norm and the head save, and the ids and labels."""
    of_stream = 2 * FP32 * config.model.dim + FP32 + one.width * config.model.dim
    return one.tokens * (of_stream // one.tp + 2 * _INT64)


def _loss(config: RunConfig, one: ForwardPass, head_weights: int) -> tuple[int, int]:
    """Bytes of the chunked loss (`nsa.model.loss`) in the forward and in the backward pass.

    They are the gradients of its inputs, and the logits of one chunk twice in fp32, or once with a copy and a block of
    the weight or of its gradient in fp32.
    """
    logits = min(one.tokens, chunk_rows(one.vocab_size)) * one.vocab_size
    block = min(head_weights, chunk_rows(config.model.dim) * config.model.dim)
    of_hidden = one.tokens * config.model.dim * one.width
    forward = max(2 * FP32 * logits, (FP32 + one.width) * logits + FP32 * block)
    return of_hidden + FP32 * head_weights + forward, 2 * of_hidden + (2 * FP32 + one.width) * head_weights


def _workspace_bytes(config: RunConfig, one: ForwardPass) -> int:
    """Largest temporary memory of the kernels that will run: the backward pass of the selected branch, if any."""
    if not {*SELECTING_KINDS} & {*config.model.attention}:
        return _packed_keys(config, one)
    if not one.on_gpu and wanted_kernels(config).selected in ("auto", "cpu"):
        return _packed_keys(config, one)
    if one.on_gpu and wanted_kernels(config).selected == "triton":
        return _slots(config, one)
    return _window_pieces(config, one) if one.on_gpu else _portable_workspace(config, one)


def _packed_keys(config: RunConfig, one: ForwardPass) -> int:
    """Compiled CPU kernels: two packed fp32 copies of one branch's keys and values, and their gradients in fp32."""
    model = config.model
    return 3 * FP32 * one.gathered_tokens * (model.n_kv_groups // one.tp) * (model.d_k + model.d_v)


def _slots(config: RunConfig, one: ForwardPass) -> int:
    """Triton kernels: the partial result of every query and selected block, which may overlap two windows of keys, and
    fp32 gradients of the windows: one sum per window, and one more for every PIECE of its readers."""
    model, geometry = config.model, config.nsa.geometry
    heads, groups = model.n_heads // one.tp, model.n_kv_groups // one.tp
    queries = one.tokens * heads * model.d_k * one.width
    slots = one.tokens * heads * 2 * geometry.n_sel * max(model.d_k, model.d_v) * one.width
    share = min(1.0, max(SLOT_BYTES, QUERIES_OF_SLOTS * queries) / slots)  # of the queries, processed in chunks
    windows = one.rows * groups * geometry.n_blocks(one.seq_len)
    sums = windows + int(share * one.tokens * groups * geometry.n_sel * 2) // PIECE
    return int(share * slots) + sums * geometry.l_sel * (model.d_k + model.d_v) * FP32


def _window_pieces(config: RunConfig, one: ForwardPass) -> int:
    """Portable kernels on a GPU: the inputs without numbers that are not finite; queries and gradients of outputs,
    copied for each window of keys that they chose; keys and values of each piece; then scores and their gradients in
    fp32, or gradients of queries and keys with the scores' as an operand. Two entries per choice (packed)."""
    model, geometry = config.model, config.nsa.geometry
    widths, l_sel = model.d_k + model.d_v, geometry.l_sel
    groups, heads = model.n_kv_groups // one.tp, model.n_heads // model.n_kv_groups
    per_query = 2 * geometry.n_sel * groups
    largest = per_query * heads * max(model.d_k, model.d_v, l_sel)
    entries = min(one.tokens, max(one.rows, OTHER_ELEMENTS // largest)) * per_query
    pieces = entries // WINDOW_PIECE + one.rows * groups * geometry.n_blocks(one.seq_len)
    rows, keys = pieces * WINDOW_PIECE * heads, pieces * l_sel
    cleaned = one.tokens * groups * (heads * (widths + model.d_v) + widths)
    copies = one.width * (cleaned + widths * (rows + keys)) + FP32 * keys * model.d_v
    of_scores = 2 * FP32 * rows * l_sel
    return copies + max(of_scores, one.width * rows * l_sel + FP32 * (rows + keys) * model.d_k)


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
    return max(shared, keys * (generations * FP32 * (model.d_k + model.d_v) + _INT64))
