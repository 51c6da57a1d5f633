"""Modelled ratios to dense attention on a B200 beside those measured by an NSA on FlashAttention-4 (meta-pytorch/MSLK).

    python -m proofs.perf_model.compare_peer

Same heads, groups and width; the peer pools 64 tokens without overlap and chooses blocks per tile of queries, which is
coarser. Lengths above 64k are modelled on blocks chosen at random: measuring them takes too much memory here.
"""

from collections.abc import Iterator

from nsa.bench.case import SHAPES, BenchShape
from nsa.bench.report import to_markdown_table
from nsa.geometry import Geometry
from nsa.token_counts import spell
from proofs.perf_model.prediction import HOST_TIME, LayerPrediction, predict
from proofs.perf_model.selection_overlap import SelectionOverlap, measure_overlap, random_overlap

OURS = SHAPES["wide"]
STRIDE_64 = BenchShape(32, 8, 128, 128, Geometry(l=64, d=64, l_sel=64, n_sel=16, w=512))
"""Compressed as the peer does."""
MEASURED = {
    8: (0.30, 0.31), 16: (0.51, 0.64), 32: (1.18, 1.48), 64: (2.97, 2.87), 128: (5.57, 4.97), 256: (9.35, 7.46),
    512: (11.8, 9.94), 1024: (13.1, 11.2),
}  # fmt: skip
"""Times of forward, and of forward + backward, by thousands of tokens. Their own documents of spring 2026."""
LONGEST_MEASURED = 65536
COLUMNS = (
    "length", "measured peer", f"modelled, {HOST_TIME}, stride 16", f"modelled, {HOST_TIME}, stride 64",
    "slowest kernels, stride 16",
)  # fmt: skip


def overlap_of(shape: BenchShape, length: int) -> SelectionOverlap:
    return (measure_overlap if length <= LONGEST_MEASURED else random_overlap)(shape, length)


def compare(lengths: tuple[int, ...] = (32, 64, 128, 256, 512, 1024)) -> Iterator[tuple[str, ...]]:
    for thousands in lengths:
        length, predictions = 1024 * thousands, []
        for shape in (OURS, STRIDE_64):
            overlap = overlap_of(shape, length)
            predictions.append([predict("b200", shape, length, "bf16", b, overlap) for b in (False, True)])
        ratios = [f"{forward.ratio:.2f} / {both.ratio:.2f}" for forward, both in predictions]
        measured = " / ".join(f"{ratio:g}" for ratio in MEASURED[thousands])
        yield spell(length), measured, *ratios, slowest(predictions[0][1])


def slowest(prediction: LayerPrediction, n: int = 3) -> str:
    ordered = sorted(prediction.kernels, key=lambda kernel: -kernel.seconds)[:n]
    return ", ".join(f"{k.name} {k.seconds / prediction.seconds:.0%} ({k.bound})" for k in ordered)


if __name__ == "__main__":
    print("\n".join(to_markdown_table(COLUMNS, list(compare()))))
