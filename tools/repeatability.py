"""Distinct gradients of equal passes: `python -m tools.repeatability`.

    python -m tools.repeatability                  20 runs of 2,048 tokens each
    python -m tools.repeatability --backend portable -k model      cases with "model" in their row
    TRITON_INTERPRET=1 python -m tools.repeatability --backend triton --runs 3 --tokens 256

Every backend and kind of layer with selection, with one thread and with two, without selector loss and with both forms
of it; then a model with every kind of layer on packed documents. 1 is what it should be; the exit code is 1 otherwise.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from tests.backends import RUN_HERE
from tests.nsa.core.test_repeatability import KINDS, LOSSES, gradients, model_gradients


def distinct(compute: Callable[[], bytes], threads: int, runs: int) -> int:
    torch.set_num_threads(threads)
    return len({compute() for _ in range(runs)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", action="append", choices=RUN_HERE)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("-k", default="", metavar="TEXT", help="only cases whose row contains this")
    arguments = parser.parse_args()
    cases = {
        f"{backend} | {kind} | {f'{blocks} blocks' if loss else 'none'}": partial(
            gradients, kind, backend, loss, blocks, arguments.tokens
        )
        for backend, kind, (loss, blocks) in product(arguments.backend or RUN_HERE, KINDS, LOSSES)
    }
    for backend in arguments.backend or RUN_HERE:
        cases[f"{backend} | model, packed | chosen blocks"] = partial(model_gradients, backend, arguments.tokens)
    if not (cases := {name: compute for name, compute in cases.items() if arguments.k in name}):
        parser.error(f"no case's row contains {arguments.k!r}")
    print(f"{arguments.runs} runs of {arguments.tokens} tokens")
    print("| backend | layer | selector loss | 1 thread | 2 threads |\n|---|---|---|---|---|")
    counts = []
    for name, compute in cases.items():
        one, two = (distinct(compute, threads, arguments.runs) for threads in (1, 2))
        counts += [one, two]
        print(f"| {name} | {one} | {two} |", flush=True)
    return int(max(counts) > 1)


if __name__ == "__main__":
    sys.exit(main())
