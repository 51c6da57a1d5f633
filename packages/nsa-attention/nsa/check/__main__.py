"""`python -m nsa.check`: which kernels run here, and whether the attention is right on this machine.

Compares with definitions (dense attention, the whole sequence, counted reads), prints each value with its limit, and
ends with 0 if all hold, 1 if one fails, 20 if a backend or device that was asked for is not here. Seconds on a CPU.
With --conformance it checks another function for attention over chosen blocks instead, row by row.
With --bundle it runs the GPU check, which is `nsa gpu-check` of the trainer, and keeps it in one archive.
"""

import argparse
import json
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nsa.bench.case import TORCH_DTYPES
from nsa.check.comparison import CheckStatus
from nsa.check.conformance import conformance, load_function
from nsa.check.installation import installation_facts, triton_lines
from nsa.check.prove import prove
from nsa.errors import ConfigError, NSAError
from nsa.kernels.cpu import build
from nsa.kernels.gpu_versions import device_named

_COUNTED = {CheckStatus.HOLDS: "hold", CheckStatus.FAILS: "fail", CheckStatus.REFUSED: "refused"}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m nsa.check", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--device", help="e.g. cpu or cuda:1 (default: cuda if available, else cpu)")
    parser.add_argument("--dtype", choices=TORCH_DTYPES, default="fp32")
    parser.add_argument("--heads", type=int, default=12, help="query heads (default: 12)")
    parser.add_argument("--kv-groups", type=int, default=2, help="key/value groups (default: 2)")
    parser.add_argument("--width", type=int, default=64, help="width of keys and values (default: 64)")
    parser.add_argument("--json", action="store_true", help="print facts and checks as JSON")
    parser.add_argument("--conformance", metavar="MODULE:FUNCTION", help="check anybody's block_sparse_attention")
    parser.add_argument("--forward-only", action="store_true", help="with --conformance: without gradients")
    archive = parser.add_argument_group("GPU check")
    archive.add_argument("--bundle", type=Path, metavar="FILE", help="run the GPU check, and keep it in this archive")
    archive.add_argument("--full", action="store_true", help="also time kernels, layers, generation, dense attention")
    archive.add_argument("--rehearse", action="store_true", help="without a GPU: interpreted, tiny shapes")
    archive.add_argument("--only", action="append", default=[], metavar="SUBJECT", help="only this subject")
    options = parser.parse_args(arguments)
    try:
        if options.bundle:
            return check_gpu(options.bundle, rehearse=options.rehearse, full=options.full, only=tuple(options.only))
        if options.full or options.rehearse or options.only:
            raise ConfigError("--full, --rehearse and --only are of the GPU check. Add --bundle FILE, its archive.")
        return _check(options)
    except NSAError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def check_gpu(bundle: Path | None, *, rehearse: bool, full: bool, only: tuple[str, ...]) -> int:
    """Run the GPU check and return its exit code."""
    if find_spec("triton") is None:
        raise ConfigError("the package triton is not installed, and its kernels are what is checked. It comes with "
                          "torch's GPU builds; for a rehearsal: pip install triton==3.7.1.")  # fmt: skip
    from nsa.check.gpu_check import GpuCheckRequest, run_gpu_check

    return run_gpu_check(GpuCheckRequest(rehearse, full, only), bundle)


def _check(options: argparse.Namespace) -> int:
    device = device_named(options.device)
    if device.type == "cpu" and not build.is_built():
        print("compiling the CPU kernels, once for this machine …", file=sys.stderr)
    sizes = device, options.dtype, options.heads, options.kv_groups, options.width, options.width
    if options.conformance:
        facts = {"function": options.conformance, "device": str(device), "dtype": options.dtype}
        function, dtype = load_function(options.conformance), TORCH_DTYPES[options.dtype]
        checks = conformance(function, device, dtype, forward_only=options.forward_only)
        if not options.json:
            print("each row: the largest error of output, log-sum-exp, dq, dk and dv against dense attention in fp64")
    else:
        facts, checks = installation_facts(*sizes), prove(*sizes)
        if not options.json:
            _print_facts(facts)
    results = []
    for result in checks:
        results.append(result)
        if not options.json:
            print(result.line, flush=True)
    if options.json:
        print(json.dumps({**facts, "checks": [result.summary for result in results]}, indent=2))
    elif options.conformance:
        counts = Counter(result.verdict for result in results)
        print(" · ".join(f"{counts[verdict]} {word}" for verdict, word in _COUNTED.items()))
    return 0 if all(result.holds for result in results) else 1


def _print_facts(facts: dict[str, Any]) -> None:
    print(f"nsa {facts['nsa']}, torch {facts['torch']}, Python {facts['python']}")
    print(f"{facts['device']} ({facts['device_name']}), {facts['threads']} threads, {facts['dtype']}")
    print("\n".join([f"kernels: {facts['kernels']}", *triton_lines(facts)]))
    for row in facts["backends"]:
        if row["here"] == "chosen":
            print(f"  {row['branch']:10} {row['backend']}: {row['why']}")
    for warning in facts["warnings"]:
        print(f"WARNING: {warning}")


if __name__ == "__main__":
    sys.exit(main())
