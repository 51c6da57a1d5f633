"""Modelled time of a whole training step on one GPU: attention kernels, matrix products, compiled rest, optimizer.

Attention is the sum of the modelled kernels (`prediction`), for all rows of the batch in each launch and rows of one
document: packed ones see fewer keys. Matrix products run at an assumed share of the peak. What `torch.compile` makes of
norms, rotations, SwiGLU and the loss, and the optimizer, move their tensors through memory once per fused group.

D model dim · F feed-forward dim · K key dim · V value dim
"""

from dataclasses import dataclass
from functools import partial

from nsa.bench.case import BenchShape
from nsa.core.branches import ATTENTION_PARTS
from nsa.options import Checkpointing
from nsa_train.config.schema import RunConfig
from nsa_train.planning.estimate import RunEstimate, estimate
from nsa_train.planning.hardware import parse_target
from proofs.perf_model.gpus import GpuModel
from proofs.perf_model.instruction_counts import count_instructions
from proofs.perf_model.prediction import Instructions, KernelPrediction, predict
from proofs.perf_model.selection_overlap import SelectionOverlap

MATRIX_SHARE = 0.55
"""Share of the peak that products of 16,384 × 768 by 768 × 768 to 768 × 32,768 reach: assumed."""
LOGIT_BYTES = 36
"""Moved per logit: cast to fp32, log-softmax, its gradient and that of the loss, cast back."""
WEIGHT_BYTES = 12
"""Moved per weight of a product: its cast to bf16, and its gradient's to fp32."""
OPTIMIZER_BYTES = 40
"""Moved per parameter: AdamW reads four tensors and writes three; the gradient's norm, and its scaling."""


@dataclass(frozen=True)
class StepPart:
    name: str
    seconds: float
    assumption: str


@dataclass(frozen=True)
class StepPrediction:
    """Modelled time of one optimizer step on one GPU."""

    gpu: str
    checkpointing: Checkpointing
    tokens: int
    parts: tuple[StepPart, ...]

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def shape_of(config: RunConfig) -> BenchShape:
    model = config.model
    return BenchShape(model.n_heads, model.n_kv_groups, model.d_k, model.d_v, config.nsa.geometry)


def for_rows(kernel: KernelPrediction, rows: int) -> float:
    """Seconds of one launch for so many rows of the batch: launches do not grow."""
    return max(s if bound == "launch" else rows * s for bound, s in kernel.bounds_s.items())


def predict_step(
    config: RunConfig,
    gpu: GpuModel,
    checkpointing: Checkpointing | None = None,
    overlap: SelectionOverlap | None = None,
    instructions: Instructions = count_instructions,
) -> StepPrediction:
    """`checkpointing`: in place of the run's; `overlap` as in `predict`, at the run's length."""
    mode = checkpointing or config.runtime.gradient_checkpointing
    config = config.model_copy(update={"runtime": config.runtime.model_copy(update={"gradient_checkpointing": mode})})
    estimated = estimate(config, parse_target(gpu.device.name), config.model.vocab_size or 32768)
    layer = predict(gpu, shape_of(config), config.train.seq_len, "bf16", True, overlap, instructions=instructions)
    rows = config.train.batch_size * config.train.accumulate_grad_batches
    attention = [sum(for_rows(k, rows) for k in layer.kernels if k.backward == b) for b in (False, True)]
    again = {"off": 0, "selective": 0, "full": 1}[mode]  # selective keeps what the attention operators return
    seconds = config.model.n_layers * (attention[0] * (1 + again) + attention[1])
    moved = partial(_by_bytes, gpu)
    parts = (
        StepPart("attention kernels", seconds, f"{config.model.n_layers} layers, {rows} rows per launch"),
        StepPart("matrix products", _products_s(estimated, gpu, mode), f"{MATRIX_SHARE:.0%} of the peak: assumed"),
        moved("compiled elementwise", estimated.tokens_per_step * config.model.n_layers * _block_bytes(config, mode)),
        moved("loss", estimated.tokens_per_step * estimated.vocab_size * LOGIT_BYTES),
        moved("casts of weights", _in_products(estimated) * WEIGHT_BYTES),
        moved("optimizer", estimated.parameters.total * OPTIMIZER_BYTES),
    )
    return StepPrediction(gpu.name, mode, estimated.tokens_per_step, parts)


def _by_bytes(gpu: GpuModel, name: str, moved: float) -> StepPart:
    return StepPart(name, moved / gpu.memory_bytes_per_s, f"{moved / 1e9:.1f} GB through memory")


def _products_s(run_estimate: RunEstimate, gpu: GpuModel, mode: Checkpointing) -> float:
    """Count the operations of projections, feed-forward and head; with checkpointing, those of the blocks once more."""
    flops = {part: count for part, count in run_estimate.flops_per_token.items() if part not in ATTENTION_PARTS}
    again = sum(count / 3 for part, count in flops.items() if part != "head") if mode != "off" else 0.0
    return run_estimate.tokens_per_step * (sum(flops.values()) + again) / (MATRIX_SHARE * gpu.flops_per_s("bf16"))


def _in_products(run_estimate: RunEstimate) -> int:
    p = run_estimate.parameters
    return p.attention + p.feed_forward + (p.head or p.embeddings)


def _block_bytes(config: RunConfig, mode: Checkpointing) -> float:
    """Count the bytes of a token in one block, forward and backward. The residual stream is fp32, everything else
    bf16."""
    m = config.model
    D, F = m.dim, m.ffn_size
    key_streams, _ = config.attention.kv_streams
    rotated = m.n_heads * m.d_k + key_streams * m.n_kv_groups * m.d_k
    pooled = m.n_kv_groups * (m.d_k + m.d_v)
    # Twice a residual sum with the norm after it: reads both and writes the sum, and its norm for the products.
    forward = 2 * 12 * D + 4 * rotated + 2 * pooled + 6 * F
    # Of each norm: both gradients, its input, their sum. SwiGLU reads three tensors and writes two.
    backward = 2 * 14 * D + 4 * rotated + 4 * pooled + 10 * F
    return forward * (2 if mode != "off" else 1) + backward
