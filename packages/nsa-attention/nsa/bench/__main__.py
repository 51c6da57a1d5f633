"""`python -m nsa.bench`: time the attention on this machine beside dense attention.

No speed-up is printed for a wrong result: outputs and gradients of both are compared with the reference, in this run.
"""

import argparse
import sys

from nsa.bench.suite import BenchRequest, bench
from nsa.errors import NSAError

_OPERATIONS = ("attention", "prefill", "decode", "train", "memory", "machine")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nsa.bench", description=__doc__.partition("\n\n")[2])
    parser.add_argument("operation", choices=_OPERATIONS, nargs="?", default="attention")
    parser.add_argument("--lengths", default="2k,4k,8k", help="tokens, e.g. 2k,4k; k is 1,024")
    parser.add_argument("--dtype", default="fp32", help="fp32, bf16 or fp16, several with commas")
    parser.add_argument("--shape", default=BenchRequest.shape, help="base, gqa16, paper, tiny or wide")
    parser.add_argument("--device", default=BenchRequest.device, help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=BenchRequest.threads, help="0: all cores")
    parser.add_argument("--budget-s", type=float, default=BenchRequest.budget_s, help="seconds of timing per case")
    options = parser.parse_args(arguments)
    request = BenchRequest(
        options.operation, options.lengths, options.dtype, options.shape, peers=False, threads=options.threads,
        budget_s=options.budget_s, device=options.device,
    )  # fmt: skip
    command = " ".join(["python -m nsa.bench", *sys.argv[1:]])
    try:
        bench(request, command, lambda text: print(text, file=sys.stderr, flush=True), print, _print_table)
    except NSAError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _print_table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    lines = [columns, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(columns))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    sys.exit(main())
