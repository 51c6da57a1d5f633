"""Compile every Triton kernel for every GPU of the table; write docs/kernels/COMPILE_REPORT.md and a JSON file.

    python -m proofs.compile_report.write [sm_80 sm_90 …]      rewrite the table; GPUs not named keep their rows
    python -m proofs.compile_report.write --check sm_80        compare with the table, exit 1 if a kernel became worse

Needs no GPU: one to four seconds per kernel, about twenty-five minutes for all. The JSON (default: artifacts/
compile_report.json) holds the reports of the GPUs compiled in this run; it is not committed.
"""

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from nsa.gpus import ARCHITECTURES as GPUS
from proofs.compile_report.report import MODELS, CompileReport, inspect, jobs
from proofs.compile_report.table import TABLE, parse, regressions, render


def compile_all(model: str, gpu: str) -> list[CompileReport]:
    return [inspect(job, model, gpu) for job in jobs(MODELS[model], gpu)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpus", nargs="*", metavar="GPU", help=f"default: all of {', '.join(GPUS)}")
    parser.add_argument("--model", action="append", choices=MODELS, help="compare this shape only (with --check)")
    parser.add_argument("--check", action="store_true", help="leave the table as it is and compare with it")
    parser.add_argument("--json", type=Path, default=Path("artifacts/compile_report.json"))
    parser.add_argument("-n", type=int, default=2, help="processes")
    args = parser.parse_args()
    if unknown := set(args.gpus) - GPUS.keys():
        parser.error(f"no such GPU: {', '.join(sorted(unknown))}. Known: {', '.join(GPUS)}")
    if args.model and not args.check:
        parser.error("--model goes with --check: the table is rewritten for all shapes of a GPU")
    recorded, new, worse = parse(TABLE.read_text(encoding="utf-8")), [], 0
    pairs = list(product(args.model or MODELS, args.gpus or GPUS))
    with ProcessPoolExecutor(args.n, get_context("spawn")) as pool:
        for reports in pool.map(compile_all, *zip(*pairs, strict=True)):
            for report in reports:
                faults = regressions(report, recorded) if args.check else report.faults()
                worse += bool(faults)
                print(f"{report.kernel} {report.model} {report.gpu}: {', '.join(faults) or 'no faults'}", flush=True)
            new += reports
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps([asdict(report) for report in new], indent=1) + "\n", encoding="utf-8")
    if args.check:
        sys.exit(worse > 0)
    compiled = {report.gpu for report in new}
    others = [report for report in recorded if report.gpu not in compiled]
    rows = [r for gpu, model in product(GPUS, MODELS) for r in (*others, *new) if (r.gpu, r.model) == (gpu, model)]
    TABLE.write_text(render(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
