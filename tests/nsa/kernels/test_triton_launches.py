"""Launches of a layer on a GPU, and operations that are forbidden between them, on fake CUDA tensors.

Kernels are recorded, not run. Torch operations that copy or compute count as launches; views and allocations do not.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import packed_layout, plain_layout
from nsa.geometry import Geometry
from nsa.kernels import ops
from nsa.kernels import triton as backend
from tests.nsa.kernels.fake_gpu import IndexingWithoutDevice
from tests.shapes import GEOMETRIES, attention_args

pytest.importorskip("triton", reason="it is in the dev extra")
import triton

from nsa.kernels.triton import tuning
from nsa.kernels.triton.block_index import build_block_index, index_sizes
from proofs.perf_model.torch_ops import OperationTally
from tests.nsa.kernels.launch_recorder import RecordedLaunch, launch_counts, recorded_launches, tensors_of

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted, not launched")

GEOMETRY = Geometry(**GEOMETRIES["seed"])
DEVICE = torch.device("cuda:1")
HEADS, GROUPS, WIDTH = 12, 2, 64
INDEX = ("sort_chunks", "place_chunks", "place_windows", "fill")
FORWARD = {"bounds": 1, "range_forward": 2, "select": 1, **dict.fromkeys(INDEX, 1), "selected_forward": 1,
           "merge_slots": 1}  # fmt: skip
BACKWARD = {"mix_backward": 1, "range_dq": 2, "seen_by": 1, "range_dkv": 2, "add_parts": 1,
            "selected_backward": 1, "add_slots": 1, "add_pieces": 1}  # fmt: skip
OF_EACH_SPAN = ("selected_forward", "merge_slots", "selected_backward", "add_slots", "add_pieces")
TORCH_OPS_OF_DECODE = 5  # of a module: its projections
BYTES_PER_CHOSEN_BLOCK = 64
ATTEND = {"decode_compressed": 1, "decode_score": 1, "decode_raw": 1, "decode_merge": 1}
DECODE = {"decode_append": 1, "decode_score": 1, "decode_raw": 1, "decode_merge": 1}


class DeviceGuards:
    """Replaces `torch.cuda.device`, which the CPU build of torch cannot enter."""

    def __init__(self) -> None:
        self.current = [torch.device("cuda:0")]

    @contextmanager
    def __call__(self, device: torch.device) -> Iterator[None]:
        self.current.append(torch.device(device))
        yield
        self.current.pop()


class OnDeviceOnly(TorchDispatchMode):
    """Refuses operations on the host's memory: a copy from or to it stalls, and cannot be captured in a CUDA graph.
    Operations that read values of a GPU's tensors, or whose shapes depend on them, fake tensors refuse by themselves.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs or {}, out)):
            assert not isinstance(x, Tensor) or x.device.type == "cuda", f"{func} uses a tensor on {x.device}"
        return out


@contextmanager
def fake_tensors() -> Iterator[None]:
    with IndexingWithoutDevice(), FakeTensorMode():
        yield


class FakeGpu:
    """Kernels launched on fake CUDA tensors inside `run`, the current device at each launch, and torch's operations."""

    def __init__(self) -> None:
        self.guards, self.devices, self.torch_ops = DeviceGuards(), [], 0
        self.launches: list[RecordedLaunch] = []

    @contextmanager
    def run(self, host_too: bool = False) -> Iterator[None]:
        with (
            mock.patch.object(torch.cuda, "device", self.guards),
            recorded_launches(lambda: self.devices.append(self.guards.current[-1])) as launches,
            nullcontext() if host_too else OnDeviceOnly(),
            OperationTally() as tally,
        ):
            yield
        self.launches, self.torch_ops = launches, tally.launches


class AttentionLayer(NamedTuple):
    """Inputs of a layer's operators; the operators' own functions are called, as a GPU's dispatcher would."""

    q: Tensor
    k: Tensor
    v: Tensor
    compressed: tuple[Tensor, Tensor]
    gates: Tensor
    pos: Tensor
    start: Tensor
    first: Tensor
    single: bool
    """Rows of one document."""

    @classmethod
    def fake(
        cls, length: int, packed: bool = True, heads: int = HEADS, groups: int = GROUPS, width: int = WIDTH,
        heads_first: bool = False, batch: int = 1,
    ) -> "AttentionLayer":  # fmt: skip
        """`heads_first`: tokens lie side by side in memory, as in caches and in other attention libraries."""

        def rows(n: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            if not heads_first:
                return torch.empty(batch, n, *shape, dtype=dtype, device=DEVICE)
            memory = torch.empty(batch, *shape[:-1], n, shape[-1], dtype=dtype, device=DEVICE)
            return memory.movedim(-2, 1)

        if packed:
            layout = packed_layout(torch.empty(5, dtype=torch.int32, device=DEVICE), length, GEOMETRY)
        else:
            layout = plain_layout(batch, length, GEOMETRY, DEVICE)
        n_compressed, of_group = layout.begin_BC.shape[1], (groups, heads // groups)
        k, v, *compressed = (rows(n, groups, width) for n in (length, length, n_compressed, n_compressed))
        gates = torch.empty(batch, length, *of_group, 3, device=DEVICE)
        return cls(rows(length, *of_group, width), k, v, tuple(compressed), gates, *layout[:3], not packed)

    @property
    def inputs(self) -> tuple[object, ...]:
        """Arguments of `nsa::attend_layer`."""
        raw = (self.k, self.v, self.pos, self.start)
        return (
            self.q,
            self.gates,
            *self.compressed,
            self.pos,
            self.first,
            *raw,
            *raw,
            GEOMETRY.ints,
            0.125,
            self.single,
            "triton",
        )

    def forward(self) -> tuple[Tensor, ...]:
        return ops._attend_layer._init_fn(*self.inputs)

    def backward(self, outputs: tuple[Tensor, ...]) -> None:
        mixed, *rest = outputs
        ops._attend_layer_backward._init_fn(torch.empty_like(mixed), None, None, None, *rest, *self.inputs)

    def one_by_one(self) -> None:
        """The operators of a layer with a second level of compressed blocks, forward and backward."""
        rest, where = (GEOMETRY.ints, 0.125, "triton"), (self.pos, self.start)
        out, lse, idx = ops._compressed_and_select._init_fn(self.q, *self.compressed, self.pos, self.first, *rest)
        selected = ops._attend._init_fn(self.q, self.k, self.v, idx, *where, "selected", *rest)
        sliding = ops._attend._init_fn(self.q, self.k, self.v, None, *where, "sliding", *rest)
        outs = (out, selected[0], sliding[0])
        mixed = ops._mix._init_fn(self.gates, *outs, "triton")
        _, *douts = ops._mix_backward._init_fn(torch.empty_like(mixed), self.gates, *outs, "triton")
        back = ops._attend_backward._init_fn
        for branch, keys, idx_or_none, (o, l), dout in (
            ("compressed", (*self.compressed,), None, (out, lse), douts[0]),
            ("selected", (self.k, self.v), idx, selected, douts[1]),
            ("sliding", (self.k, self.v), None, sliding, douts[2]),
        ):
            at = (self.pos, self.first) if branch == "compressed" else where
            back(dout, self.q, *keys, idx_or_none, *at, o, l, None, branch, *rest)


@pytest.mark.parametrize(("length", "packed"), [(2048, True), (8192, True), (5000, False)])
def test_launches_of_a_layer(length, packed):
    """Allows no torch operation beside them: each would be a launch, too."""
    with fake_tensors():
        forward, backward = passes_of(AttentionLayer.fake(length, packed=packed))
    assert dict(launch_counts(forward.launches)) == FORWARD
    assert dict(launch_counts(backward.launches)) == BACKWARD
    assert forward.torch_ops == backward.torch_ops == 0


def passes_of(layer: AttentionLayer) -> tuple[FakeGpu, FakeGpu]:
    forward, backward = FakeGpu(), FakeGpu()
    with forward.run():
        outputs = layer.forward()
    with backward.run():
        layer.backward(outputs)
    return forward, backward


SIZES = {
    "125M, 16 rows of 8k": (dict(length=8192, batch=16, packed=False), 4, 2**30),
    "7B, 128k": (dict(length=2**17, heads=32, groups=8, width=128, packed=False), 8, 2**31),
    "7B, 128k, packed": (dict(length=2**17, heads=32, groups=8, width=128), 16, 2**31),
}


@pytest.mark.parametrize(("sizes", "n_spans", "most_bytes"), SIZES.values(), ids=SIZES)
def test_only_what_uses_slots_is_launched_for_each_span_of_queries(sizes, n_spans, most_bytes):
    with fake_tensors():
        passes = passes_of(AttentionLayer.fake(**sizes))
    for gpu, of_one_span in zip(passes, (FORWARD, BACKWARD), strict=True):
        counts = launch_counts(gpu.launches)
        assert counts.pop("add_parts", 1) == 1  # where keys are many, no part of them is left to add
        expected = {name: n * (n_spans if name in OF_EACH_SPAN else 1) for name, n in of_one_span.items()}
        assert dict(counts) == {name: n for name, n in expected.items() if name != "add_parts"}
        slots = [x.arguments["slot"] for x in gpu.launches if "slot" in x.arguments]
        assert {x.nbytes <= most_bytes for x in slots} == {True}
        assert len({x.untyped_storage()._cdata for x in slots}) == 1


def test_every_operator_launches_on_the_device_of_its_tensors():
    with fake_tensors():
        layer, gpu = AttentionLayer.fake(2048), FakeGpu()
        with gpu.run():
            layer.backward(layer.forward())
            layer.one_by_one()
            ops._select._init_fn(layer.q, layer.compressed[0], layer.pos, layer.first, GEOMETRY.ints, 0.125, "triton")
    assert len(gpu.devices) == len(gpu.launches) > 30
    assert set(gpu.devices) == {DEVICE}
    assert gpu.guards.current == [torch.device("cuda:0")]


def fake_attention(
    heads: int = HEADS, groups: int = GROUPS, width: int = WIDTH, kind: str = "nsa", **options: object
) -> NSAAttention:
    sizes = attention_args("seed", (heads, groups), dim=768, d_k=width, d_v=width, **options)
    with torch.device("meta"):
        module = NSAAttention(**sizes, kind=kind, kernels="triton")
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(torch.empty(parameter.shape, device=DEVICE, dtype=torch.bfloat16)))
    return module.eval()


def decoded(batch: int, room: int, heads: int = HEADS, groups: int = GROUPS, width: int = WIDTH) -> FakeGpu:
    """The attention of one new token per row, of a cache for `room` tokens."""
    with fake_tensors(), torch.no_grad():
        cache, rows = fake_attention(heads, groups, width).new_cache(batch, room), (batch, 1, groups, heads // groups)
        q = torch.empty(*rows, width, dtype=torch.bfloat16, device=DEVICE)
        gates, gpu = torch.empty(*rows, 3, device=DEVICE), FakeGpu()
        sizes = dict(heads_per_group=heads // groups, means=True, geometry=GEOMETRY, scale=0.125)
        decoder = cache.decoder(backend.TritonDecoder, **sizes)
        with gpu.run():
            decoder.attend(q, gates)
    return gpu


def stepped(batch: int, room: int, heads: int = HEADS, groups: int = GROUPS, width: int = WIDTH) -> FakeGpu:
    """One new token per row of a whole module, of a cache for `room` tokens."""
    with fake_tensors(), torch.no_grad():
        attention = fake_attention(heads, groups, width, phi="softmax", qk_norm=True)
        cache, x = attention.new_cache(batch, room), torch.empty(batch, 1, 768, dtype=torch.bfloat16, device=DEVICE)
        gpu, where = FakeGpu(), attention.locate(x, cache=cache)
        with gpu.run():
            attention(x, cache=cache, where=where)
    return gpu


def test_launches_of_a_decoding_step():
    """Four kernels, whatever the lengths, on the cache's device, and no torch operation."""
    gpu = decoded(4, 1024)
    assert dict(launch_counts(gpu.launches)) == ATTEND
    assert gpu.torch_ops == 0
    assert set(gpu.devices) == {DEVICE}


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(phi="softmax", kv="shared", qk_norm=True, gate="sigmoid", gate_per="group"),
        dict(phi="weighted", kv="shared_keys", rotary_dim=32),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["nsa", "global", "merged"])
def test_a_decoding_step_of_a_module_reads_no_value(kind, options):
    """Norms, RoPE, the cache, φ, gates and attention are in four kernels; no value is read, nothing depends on values,
    and nothing is copied from or to the host. Positions are computed before, once for all layers."""
    with fake_tensors(), torch.no_grad():
        attention = fake_attention(kind=kind, **options)
        cache, x = attention.new_cache(4, 1024), torch.empty(4, 1, 768, dtype=torch.bfloat16, device=DEVICE)
        where, first, steps = attention.locate(x, cache=cache), FakeGpu(), [FakeGpu(), FakeGpu(), FakeGpu()]
        for gpu in (first, *steps):  # the first one prepares a decoder
            with gpu.run():
                attention(x, cache=cache, where=where)
    assert [dict(launch_counts(gpu.launches)) for gpu in steps] == [DECODE] * 3
    assert {gpu.torch_ops for gpu in steps} == {TORCH_OPS_OF_DECODE - (kind == "merged")}
    # The same addresses and sizes at every step, but for fresh results: fit to be captured once and replayed.
    scalars = [
        sorted((x.kernel, n, v) for x in gpu.launches for n, v in x.arguments.items() if isinstance(v, int | float))
        for gpu in steps
    ]
    assert scalars[0] == scalars[1] == scalars[2]


def test_a_phi_with_maps_computes_an_entry_at_every_step():
    """One launch more, and PyTorch's operations of φ: the same ones whether a block ends or not."""
    with fake_tensors(), torch.no_grad():
        attention = fake_attention(phi="mlp")
        cache, x = attention.new_cache(4, 1024), torch.empty(4, 1, 768, dtype=torch.bfloat16, device=DEVICE)
        where, steps = attention.locate(x, cache=cache), [FakeGpu(), FakeGpu(), FakeGpu()]
        for gpu in steps:
            with gpu.run(host_too=True):  # rotations after φ: a fake device keeps no table
                attention(x, cache=cache, where=where)
    assert [dict(launch_counts(gpu.launches)) for gpu in steps] == [DECODE | {"decode_compressed": 1}] * 3
    assert steps[1].torch_ops == steps[2].torch_ops


@pytest.mark.parametrize("length", [2**14, 2**16, 2**18, 2**20, 2**21, 2**22])
def test_the_block_index_takes_memory_in_proportion_to_the_chosen_blocks(length):
    """Measures a span of 65,536 queries over all keys: queries × windows of keys would be gigabytes at 1M tokens."""
    n_queries, gpu = min(length, 65536), FakeGpu()
    with fake_tensors():
        idx = torch.empty(1, n_queries, GROUPS, GEOMETRY.n_sel, dtype=torch.int32, device=DEVICE)
        pos, start = (torch.empty(1, n_queries, dtype=torch.int64, device=DEVICE) for _ in range(2))
        with gpu.run():
            build_block_index(idx, pos, start, index_sizes(idx.shape, 2, GEOMETRY.l_sel, length))
    sizes = {id(x): x.nbytes for launch in gpu.launches for x in tensors_of(launch)}
    taken = sum(sizes.values()) - sum(x.nbytes for x in (idx, pos, start))
    assert taken / idx.numel() <= BYTES_PER_CHOSEN_BLOCK


@pytest.mark.parametrize(("index", "name"), [(0, "sm_80"), (1, "sm_90")])
def test_tiles_are_those_of_the_gpu_of_the_tensors(index, name, monkeypatch):
    """One process, two kinds of GPU: the current one is asked, which is the tensors' (see the tests above)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: index)
    monkeypatch.setattr(tuning, "_architecture", {0: "sm_80", 1: "sm_90"}.__getitem__)
    assert tuning.choose("range_forward", 64) == tuning.choose("range_forward", 64, name)
    assert tuning.limits_here().name == name
