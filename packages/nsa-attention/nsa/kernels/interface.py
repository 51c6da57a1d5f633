"""Interface of a kernel backend: the inputs of one branch, the functions a backend supplies, the decoder it may offer.

B batch · S queries · T keys · n slots · G kv groups · R heads per group · K key dim · V value dim · N chosen blocks
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from nsa.geometry import Geometry

_Function = TypeVar("_Function", bound=Callable[..., object])
Gradients = tuple[Tensor, Tensor, Tensor]
"""Those of queries, keys and values."""


def constant_when_traced(function: _Function) -> _Function:
    """`torch.compiler.assume_constant_result`: tracing calls the function and keeps its result.

    Written here because torch's decorator imports `torch._dynamo`, which takes longer than importing torch itself.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class KernelShape(NamedTuple):
    """Sizes that a kernel is compiled for."""

    n_kv_groups: int
    heads_per_group: int
    d_k: int
    d_v: int
    geometry: Geometry


_UNCHANGED = nullcontext()


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Context with x's GPU as the current one: Triton launches kernels there, wherever their tensors are."""
    return _UNCHANGED if x.device.type != "cuda" else torch.cuda.device(x.device)


class BranchInputs(NamedTuple):
    """Queries, keys and values of one branch. Positions and starts as in `nsa.kernels.reference`."""

    branch: str
    """sliding, compressed or selected."""
    q_BSGRK: Tensor
    k_BTGK: Tensor
    """One key per token; in the compressed branch one per compressed block."""
    v_BTGV: Tensor
    idx_BSGN: Tensor | None
    """Chosen blocks, in the selected branch: int32, ascending, −1 past the last. No block twice: a backend may count it
    once or twice. Every `select` keeps to this, and `nsa.core.functional` sorts and removes repeats of given blocks."""
    pos_BS: Tensor
    """Position in the query's document; below 0 it sees nothing. Queries of a row that see anything follow one another
    on the axis of raw keys, as tokens do: in the sliding branch start + pos grows by one from each to the next; in the
    others it may leap forward where a row is divided among ranks (`nsa_train.train.parallel`)."""
    start_BS: Tensor
    """Where position 0 of the query's document lies on the key axis; in the compressed branch, its block 0. A
    stride of 0 along the queries says that each row is one document."""
    geometry: Geometry
    scale: float

    @property
    def chosen_BSGN(self) -> Tensor:
        """The blocks of the selected branch."""
        assert self.idx_BSGN is not None, f"the {self.branch} branch has no chosen blocks"
        return self.idx_BSGN


def is_one_document(start_BS: Tensor) -> bool:
    """Whether each row of these starts is one document."""
    return start_BS.shape[1] == 1 or start_BS.stride(1) == 0


class LayerInputs(NamedTuple):
    """What a layer with three branches attends with: queries, gates, and each branch's keys, values, positions and
    starts, as in `BranchInputs`."""

    q_BSGRK: Tensor
    gates_BSGX3: Tensor
    k_cmp: Tensor
    v_cmp: Tensor
    pos_cmp: Tensor
    first_BS: Tensor
    k_sel: Tensor
    v_sel: Tensor
    pos_sel: Tensor
    start_sel: Tensor
    k_win: Tensor
    v_win: Tensor
    pos_win: Tensor
    start_win: Tensor
    geometry: Geometry
    scale: float
    one_document: bool
    """Whether each row is one document: said once, because a compiler or an offloaded tensor may lose a stride of 0."""

    @property
    def compressed(self) -> BranchInputs:
        k, v, pos, first = self[2:6]
        return BranchInputs("compressed", self.q_BSGRK, k, v, None, pos, first, self.geometry, self.scale)

    def selected(self, idx_BSGN: Tensor) -> BranchInputs:
        k, v, pos, start = self[6:10]
        return BranchInputs("selected", self.q_BSGRK, k, v, idx_BSGN, pos, start, self.geometry, self.scale)

    @property
    def sliding(self) -> BranchInputs:
        k, v, pos, start = self[10:14]
        return BranchInputs("sliding", self.q_BSGRK, k, v, None, pos, start, self.geometry, self.scale)


class LayerOutputs(NamedTuple):
    """Mixed output and chosen blocks of a layer, log-sum-exps and outputs of its branches, and what its backward pass
    would otherwise compute again."""

    mixed_BSGRV: Tensor
    idx_BSGN: Tensor
    lse_cmp: Tensor
    lse_sel: Tensor
    lse_win: Tensor
    out_cmp: Tensor
    out_sel: Tensor
    out_win: Tensor
    for_backward: Tensor
    """Which keys each query sees, and which queries chose each window of keys, as the backend has it: one-dimensional,
    int32."""


class BackendKernels(Protocol):
    """The functions of a backend's module, on tensors and without autograd. A query at a position below 0 sees nothing
    and selects nothing. `nsa.kernels.ops` makes operators of them.
    """

    def attend_forward(self, x: BranchInputs, /) -> tuple[Tensor, Tensor]:
        """Output [B, S, G, R, V], zeros where a query sees nothing, and log-sum-exps [B, S, G, R], −inf there."""

    def attend_backward(
        self, x: BranchInputs, out_BSGRV: Tensor, lse_BSGR: Tensor, dout_BSGRV: Tensor, dlse_BSGR: Tensor | None, /
    ) -> Gradients:
        """From the forward's results and their gradients; `dlse` is None where the log-sum-exps have none."""

    def select(
        self, q_BSGRK: Tensor, k_BCGK: Tensor, pos_BS: Tensor, first_BS: Tensor, geometry: Geometry, scale: float, /
    ) -> Tensor:
        """The chosen blocks: as in `BranchInputs`, [B, S, G, n_sel]; which ones, as in `reference.select_blocks`."""


class FusedBackendKernels(BackendKernels, Protocol):
    """Optional kernels of a backend that compute several steps in one pass."""

    def compressed_and_select(self, x: BranchInputs, /) -> tuple[Tensor, Tensor, Tensor]:
        """The compressed branch's output, its log-sum-exps and the chosen blocks in one pass."""

    def layer_forward(self, x: LayerInputs, /) -> LayerOutputs:
        """The three branches, the selection and the mix."""

    def index_length(self, x: LayerInputs, idx_BSGN: Tensor, /) -> int:
        """Numbers in what `layer_forward` returns as `for_backward`; reads no data."""

    def layer_backward(
        self, x: LayerInputs, y: LayerOutputs, dlse_cmp: Tensor | None, dlse_sel: Tensor | None,
        dlse_win: Tensor | None, /,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Gradients of queries, gates, and each branch's keys and values. The mixed output's place in `y` has its
        gradient."""

    def mix_forward(self, gates: Tensor, compressed: Tensor, selected: Tensor, sliding: Tensor, /) -> Tensor:
        """The branches' outputs mixed by the gates, as `reference.mix`."""

    def mix_backward(
        self, dout: Tensor, gates: Tensor, compressed: Tensor, selected: Tensor, sliding: Tensor, /
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients of the gates and of each branch's output."""


class KeyPages(NamedTuple):
    """Keys and values in pages: entry t of row b is state t % states of page table[b, t // states].

    Any strides, but for the last axis. An entry of the table may be anything where the row has no tokens yet.
    """

    k: Tensor
    """[pages, G, states, K]"""
    v: Tensor
    """[pages, G, states, V]"""
    table_BP: Tensor
    """int32"""

    @property
    def n_entries(self) -> int:
        """Entries that a row may have."""
        return self.table_BP.shape[1] * self.k.shape[2]


def one_page_per_row(k_BTGK: Tensor, v_BTGV: Tensor) -> KeyPages:
    """Keys and values that lie in one piece for each row, as pages, in place."""
    table_B1 = torch.arange(len(k_BTGK), dtype=torch.int32, device=k_BTGK.device)[:, None]
    return KeyPages(k_BTGK.transpose(1, 2), v_BTGV.transpose(1, 2), table_B1)


class CachedKeys(NamedTuple):
    """Keys of one branch for the newest token of each row."""

    pages: KeyPages
    pos_B1: Tensor
    """Where the newest token stands among a row's entries."""
    start_B1: Tensor
    """The entry that is position 0, or compressed block 0."""


class CacheView(NamedTuple):
    """A cache's own tensors: they are written in place and never replaced."""

    tail: KeyPages
    """The last l raw tokens, from which compressed entries are made: a ring of its number of entries."""
    compressed: CachedKeys
    selected: CachedKeys
    window: CachedKeys
    """A ring of the last w tokens, or all tokens."""
    length_B: Tensor
    n_compressed_B: Tensor


class TokenForm(NamedTuple):
    """What `TokenDecoder.step` does with the projections of a layer's new token."""

    key_streams: int
    """Keys that a group's projection has: one per branch, or one for all."""
    value_streams: int
    pooling: str | None
    """φ, if it is a sum of a block's tokens (`PoolingOperator.sums`): then the decoder emits entries."""
    turns_entries: bool
    """Compressed keys are rotated after φ."""
    gate: str | None
    """Kind of the gates, as in `nsa.core.branches.BranchGates`; None: there are none."""
    branches: int
    """Those that have a gate."""
    temperature: float


class NewToken(NamedTuple):
    """Projections of one new token per row, [B, 1, …], as the linear layers return them, and the layer's weights that
    are applied before attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor | None
    """Logits."""
    cos: Tensor
    """[B, 1, pairs that are rotated], in fp32."""
    sin: Tensor
    q_norm: Tensor | None
    """Weight of RMSNorm over each head; None: there is none, or it was applied."""
    k_norm: Tensor | None
    eps: float
    phi_k: tuple[Tensor, ...]
    """Weights of φ of the keys, [G, …] each, in the order of its parameters."""
    phi_v: tuple[Tensor, ...]


class TokenDecoder(Protocol):
    """Decodes one new token per row over a KV cache, all branches at once, without gradients.

    Made once per cache, because at batch 1 describing the cache takes as long as attending over it: from a cache, the
    number of heads per group, whether compressed entries are plain means of the tail (`means`: then the decoder may
    emit them itself), the geometry, the scale, and whether it is for layers of kind `merged`.
    """

    @property
    def append(self) -> Callable[[tuple[Tensor, ...]], bool] | None:
        """Appends one new token per row (keys and values of the compressed, selected and window branch, [B, 1, G, K or
        V]), advances lengths and positions; true if a row now ends a compressed block that the cache has to emit.
        Raises for tokens of another shape or device, and for rows without room. None: the cache appends by itself.
        """

    @property
    def step(self) -> Callable[[NewToken, TokenForm, Callable[[], None] | None], tuple[Tensor, Tensor]] | None:
        """Norm, rotate and append one new token per row, emit the compressed entries that end with it, advance lengths
        and positions, and `attend`: the result is that of `attend`. The third argument emits entries if the decoder
        does not; it is called at every step, while the token is not counted in the lengths yet. Nothing is checked,
        and the host reads no value. None: there is no such step."""

    def attend(self, q_B1GRK: Tensor, gates_B1GR3: Tensor | None) -> tuple[Tensor, Tensor]:
        """The three branches mixed by the gates, [B, 1, G, R, V], and the chosen blocks, [B, 1, G, N]. A decoder of
        layers of kind `merged` takes no gates."""
