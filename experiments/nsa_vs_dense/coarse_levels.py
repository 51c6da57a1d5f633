"""Accuracy of trained models with a second level of the compressed branch, which has no weights of its own.

    python -m experiments.nsa_vs_dense.coarse_levels extended_32k --lengths 8192,32768 --levels 0,16x4,16x8,16x16

A level is ENTRIESxBLOCKS: entries of a coarse block, and coarse blocks that a query reads; 0 is one level. Nothing is
trained: the figures are a lower bound of what training with the second level would give. Prints a row per length and
level: accuracy of the answers, and the share of the compressed entries that queries read.
"""

import argparse
from statistics import fmean

from experiments.nsa_vs_dense.depth_map import held_out_answers
from experiments.nsa_vs_dense.tables import StudyRun, read_tables
from nsa.core.nsa_attention import NSAAttention
from nsa.core.probe import attention_layers
from nsa.geometry import CoarseLevel
from nsa_train.infer.load_model import LoadedModel, load_model


def set_level(loaded: LoadedModel, level: CoarseLevel | None) -> NSAAttention:
    """Give every NSA layer this second level; returns one of them."""
    layers = [layer for layer in attention_layers(loaded.model).values() if layer.gates]
    for layer in layers:
        layer.strategy.coarse = level
    return layers[0]


def accuracy(loaded: LoadedModel, length: int, rows: int) -> float:
    """Share of right answers in held-out rows of this length."""
    return fmean(hit for _, hit in held_out_answers(loaded, length, rows))


def share_read(layer: NSAAttention, length: int) -> float:
    """Return the share of compressed entries before a query that it reads, averaged over a row."""
    if layer.coarse is None:
        return 1.0
    g = layer.geometry
    return layer.coarse.total_reads(g, length)["compressed"] / g.total_reads(length)["compressed"]


def _level(text: str) -> CoarseLevel | None:
    entries, _, blocks = text.partition("x")
    return CoarseLevel(int(entries), int(blocks)) if blocks else None


def _finished_runs(table: str) -> list[StudyRun]:
    return [run for run in read_tables()[table].runs if run.finished and "dense" not in run.variant]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=read_tables())
    parser.add_argument("--lengths", type=lambda text: [int(word) for word in text.split(",")], required=True)
    parser.add_argument("--levels", type=lambda text: text.split(","), required=True)
    parser.add_argument("--rows", type=int, default=10, help="rows of each length (default 10)")
    options = parser.parse_args()
    print("| variant | seed | tokens | coarse entries × blocks | entries read | accuracy |\n|---|---|---|---|---|---|")
    for run in _finished_runs(options.table):
        loaded = load_model(run.folder)
        for length in options.lengths:
            for level in options.levels:
                layer = set_level(loaded, _level(level))
                share_right = accuracy(loaded, length, options.rows)
                read = share_read(layer, length)
                print(
                    f"| {run.variant} | {run.seed} | {length:,} | {level} | {read:.1%} | {share_right:.3f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
