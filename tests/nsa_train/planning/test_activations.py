"""Estimated activation memory of a pass, against what an allocator counted during one of the engine's module."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from nsa.core import layer_kinds
from nsa.core.positions import packed_layout
from nsa.kernels import portable
from nsa.kernels.interface import BranchInputs
from nsa.kernels.triton import SLOT_BYTES
from nsa.model import loss
from nsa.options import ATTENTION_KINDS, CHECKPOINTING
from nsa_train.config.model_sections import KernelsConfig
from nsa_train.config.schema import RunConfig
from nsa_train.planning.activations import ForwardPass, _BlockTensors, _workspace_bytes
from nsa_train.planning.estimate import estimate
from nsa_train.planning.hardware import CPU, DEVICES, HardwareTarget
from tests.covering_cases import each_value
from tests.nsa.kernels.fake_gpu import fake_gpu

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

SMALL_BLOCKS = dict(l=8, d=4, l_sel=8, n_sel=4, w=16)
LARGE_BLOCKS = dict(l=32, d=16, l_sel=64, n_sel=4, w=128)
# Their peaks lie at different moments: in the attention's kernels, at the loss, in the feed-forward.
SIZES = {
    "kernels": (dict(dim=64, n_layers=2, n_heads=4, d_k=16, d_v=16), SMALL_BLOCKS, 2, 1024, 257),
    "loss": (dict(dim=128, n_layers=3, n_heads=4, d_k=32, d_v=32), SMALL_BLOCKS, 2, 512, 4000),
    "blocks": (dict(dim=192, n_layers=4, n_heads=6, d_k=32, d_v=32), LARGE_BLOCKS, 2, 512, 257),
}


def config_of(size: str, *, precision: str = "bf16", checkpointing: str = "off", options=None, **nsa) -> RunConfig:
    """`options`: further settings of `model`."""
    model, blocks, rows, seq_len, vocab_size = SIZES[size]
    return RunConfig.model_validate(
        {
            "model": {**model, "n_kv_groups": 2, "vocab_size": vocab_size, **(options or {})},
            "nsa": {**blocks, **nsa},
            "runtime": {"device": "cpu", "precision": precision, "gradient_checkpointing": checkpointing},
            # The compiled kernels take their own memory where the profiler does not see it.
            "kernels": dict.fromkeys(("compressed", "select", "selected", "sliding"), "portable"),
            "train": {"seq_len": seq_len, "batch_size": rows, "steps": 1},
            "data": {"dataset": "synthetic"},
        }
    )


def measured_peak(config: RunConfig) -> int:
    """Bytes alive at once in a forward and backward pass, above weights and gradients, which exist before it.

    The profiler hears every allocation and release of torch's CPU allocator, those inside of our kernels included.
    """
    from nsa_train.train.distributed import RankInfo
    from nsa_train.train.engine.build import build_train_module

    module = build_train_module(config, 257, RankInfo(), torch.device("cpu"))
    tokens = torch.randint(257, (config.train.batch_size, config.train.seq_len))

    for parameter in module.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as heard:
        loss = module.model_forward(tokens, labels=tokens, loss_reduction="sum", return_logits=False).loss
        loss.backward()
        del loss
    events = [event for event in heard.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    assert alive < peak / 20  # a pass leaves nothing behind, so the count is a whole one
    return peak


@pytest.mark.parametrize(
    ("of_size", "checkpointing"),
    each_value([*((size, "bf16") for size in SIZES), ("blocks", "fp32")], list(CHECKPOINTING)),
    ids=str,
)
def test_the_estimated_peak_is_near_the_measured_one(of_size, checkpointing):
    size, precision = of_size
    config = config_of(size, precision=precision, checkpointing=checkpointing)
    estimated = estimate(config, HardwareTarget(DEVICES[CPU]), 257).memory.activations.peak(checkpointing)
    # What is kept is known to the tensor; what kernels use meanwhile depends on the data.
    tolerance = 0.15 if checkpointing != "off" or size == "kernels" else 0.05
    assert estimated == pytest.approx(measured_peak(config), rel=tolerance)


def test_the_loss_takes_the_memory_of_one_chunk(monkeypatch):
    """Takes less than a third of the pass with the engine's head and all logits; the estimate follows the size of a
    chunk."""
    from olmo_core.nn.lm_head import LMHead

    from nsa_train.train.engine.transformer import ChunkedHead

    monkeypatch.setattr(loss, "_CHUNK_ELEMENTS", 1 << 19)
    config = config_of("loss", precision="fp32", checkpointing="full", options=dict(vocab_size=16000))
    estimated = estimate(config, HardwareTarget(DEVICES[CPU]), 257).memory.activations.recomputed
    chunked = measured_peak(config)
    assert estimated == pytest.approx(chunked, rel=0.15)
    monkeypatch.setattr(ChunkedHead, "forward", LMHead.forward)
    assert measured_peak(config) > 3 * chunked


def test_each_mode_keeps_less_than_the_one_before():
    """Compares in a deep model: the inputs of all blocks, their operators' results, or everything."""
    configs = [config_of("blocks", checkpointing=mode, options=dict(n_layers=6)) for mode in CHECKPOINTING]
    off, selective, full = (measured_peak(config) for config in configs)
    assert off > 1.5 * selective
    assert selective > 1.2 * full


def test_norms_of_outputs_and_of_all_heads_together():
    options = dict(post_norm=True, qk_norm=True, qk_norm_per="layer", ffn_bias=True, rope_layers=["scaled", "none"])
    config = config_of("blocks", precision="fp32", options=options)
    estimated = estimate(config, HardwareTarget(DEVICES[CPU]), 257).memory.activations.kept
    assert estimated == pytest.approx(measured_peak(config), rel=0.05)


@pytest.mark.parametrize(
    "nsa",
    [
        dict(phi="mlp", rope_compressed="after"),
        dict(phi="linear", phi_pos_emb=True),
        dict(phi="weighted"),
        dict(phi="softmax"),
    ],
)
def test_other_ways_to_compress(nsa):
    config = config_of("blocks", precision="fp32", **nsa)
    estimated = estimate(config, HardwareTarget(DEVICES[CPU]), 257).memory.activations.kept
    assert estimated == pytest.approx(measured_peak(config), rel=0.15)


OPTIONS = {
    "shared": (dict(), dict(kv="shared")),
    "shared_after": (dict(), dict(kv="shared", rope_compressed="after")),
    "shared_keys": (dict(), dict(kv="shared_keys")),
    "shared_keys_after": (dict(qk_norm=True), dict(kv="shared_keys", rope_compressed="after")),
    "selector_loss": (dict(), dict(selector_loss=1.0)),
    "selector_loss_mlp": (dict(qk_norm=True), dict(selector_loss=1.0, phi="mlp")),
    "selector_loss_shared": (dict(qk_norm=True), dict(kv="shared", selector_loss=1.0, phi="softmax")),
    "qk_norm": (dict(qk_norm=True), dict()),
    "biases": (dict(qkv_bias=True, attention_out_bias=True), dict()),
    "all": (dict(qk_norm=True, qkv_bias=True, attention_out_bias=True), dict(kv="shared")),
}


@pytest.mark.parametrize(("name", "precision"), each_value(list(OPTIONS), ["bf16", "fp32"]))
def test_options_of_the_attention(name, precision):
    options, nsa = OPTIONS[name]
    config = config_of("blocks", precision=precision, options=dict(n_layers=2, **options), **nsa)
    estimated = estimate(config, HardwareTarget(DEVICES[CPU]), 257).memory.activations.kept
    assert estimated == pytest.approx(measured_peak(config), rel=0.05)


@pytest.mark.parametrize("attention", [*(kind for kind in ATTENTION_KINDS if kind != "nsa"), "dense,nsa,window,global"])
def test_other_kinds_of_layers(attention, monkeypatch):
    monkeypatch.setattr(layer_kinds, "COMPILED_ON_CPU", "none")  # its memory is not heard; dense takes PyTorch's
    loss = 1.0 if attention == "merged" else 0.0  # nothing else trains its φ
    config = config_of("blocks", options=dict(attention=attention), selector_loss=loss)
    automatic = KernelsConfig(**dict.fromkeys(("compressed", "select", "selected"), "portable"))
    config = config.model_copy(update={"kernels": automatic if attention == "dense" else config.kernels})
    estimated = estimate(config, HardwareTarget(DEVICES[CPU]), 257).memory.activations.kept
    assert estimated == pytest.approx(measured_peak(config), rel=0.05)


def test_checkpointing_keeps_inputs_only():
    deep = config_of("blocks", precision="bf16", checkpointing="full")
    shallow = deep.model_copy(update={"model": deep.model.model_copy(update={"n_layers": 2})})
    memory = [estimate(config, HardwareTarget(DEVICES[CPU]), 257).memory.activations for config in (shallow, deep)]
    inputs = 2 * deep.train.batch_size * deep.train.seq_len * deep.model.dim * 4
    assert memory[1].recomputed - memory[0].recomputed == inputs
    assert memory[1].kept - memory[0].kept > 10 * inputs


def test_the_triton_kernels_keep_the_bounds_and_the_block_index():
    block_index = pytest.importorskip("nsa.kernels.triton.block_index", reason="Triton is in the dev extra")
    bounds = pytest.importorskip("nsa.kernels.triton.bounds")
    config = config_of("blocks")
    model, geometry = config.model, config.nsa.geometry
    shape = (1, 8192, model.n_kv_groups, geometry.n_sel)
    numbers = block_index.index_sizes(shape, 2, geometry.l_sel, 8192).length
    numbers += 2 * bounds.bounds_length(torch.empty(1, 8192, device="meta"))
    block = _BlockTensors(config, ForwardPass(1, 8192, 257, autocast=True, width=2, on_gpu=True), "nsa")
    assert 4 * numbers == pytest.approx(8192 * block.index_bytes(), rel=0.02)


def test_the_triton_kernels_take_slots_up_to_a_limit():
    """Held against what they allocate by tests/nsa/kernels/test_triton.py."""
    config = config_of("blocks", precision="bf16")
    config = config.model_copy(update={"kernels": config.kernels.model_copy(update={"selected": "triton"})})

    def workspace(seq_len: int) -> int:
        return _workspace_bytes(config, ForwardPass(1, seq_len, 257, autocast=True, width=2, on_gpu=True))

    itself, slots = 6 * 32 * 2, 6 * 2 * 4 * 32 * 2
    assert workspace(4096) >= 4096 * slots
    assert workspace(8192) < 2.1 * workspace(4096)
    many = 4 * SLOT_BYTES // slots
    assert workspace(many) > SLOT_BYTES
    assert workspace(2 * many) - workspace(many) < many * (2 * itself + slots / 5)  # sums are as many as keys


@pytest.mark.parametrize("seq_len", [4096, 50_048])
def test_the_portable_kernels_on_a_gpu_take_what_they_allocate(seq_len):
    """Against tensors recorded on fake CUDA tensors, in the backward pass of the selected branch."""
    config = config_of("blocks", precision="bf16", checkpointing=False)
    estimated = _workspace_bytes(config, ForwardPass(1, seq_len, 257, autocast=True, width=2, on_gpu=True))
    model, geometry = config.model, config.nsa.geometry
    heads = 1, seq_len, model.n_kv_groups, model.n_heads // model.n_kv_groups

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    with fake_gpu() as recorded:
        layout = packed_layout(empty(5, dtype=torch.int32), seq_len, geometry)
        q, out = empty(*heads, model.d_k), empty(*heads, model.d_v)
        k, v = empty(*heads[:3], model.d_k), empty(*heads[:3], model.d_v)
        idx = empty(*heads[:3], geometry.n_sel, dtype=torch.int32)
        x = BranchInputs("selected", q, k, v, idx, layout.pos_BS, layout.start_BS, geometry, 1.0)
        recorded.peak_bytes = before = recorded.live_bytes
        gradients = portable.attend_backward(x, out, empty(*heads, dtype=torch.float32), out, None)
        peak = recorded.peak_bytes - before
    held = sum(x.nbytes for x in gradients) + 2 * (gradients[1].nbytes + gradients[2].nbytes)  # summed in fp32
    assert estimated == pytest.approx(peak - held, rel=0.1)
