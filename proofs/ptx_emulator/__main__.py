"""Runs compiled kernels in the emulator from the command line: numbers, findings and instruction counts.

    python -m proofs.ptx_emulator list
    python -m proofs.ptx_emulator run sliding --gpu sm_90 --dtype bf16
    python -m proofs.ptx_emulator run all --gpu sm_80 --json counts.json
    python -m proofs.ptx_emulator ptx range_forward_kernel --case sliding --gpu sm_80
    python -m proofs.ptx_emulator faults                       # plants every fault of planted_faults.toml
    python -m proofs.ptx_emulator faults -k wait
    python -m proofs.ptx_emulator idle-stores --gpu sm_80      # copies of stores that no case reaches
    python -m proofs.ptx_emulator unknown --gpu sm_100         # instructions that cannot be emulated

No GPU is needed. `run` fails if a figure is out of its limit or the emulator reports a finding. Existing kernel tests
run in the emulator too:

    NSA_EMULATE=sm_80 pytest tests/nsa/kernels/test_backends.py -k "triton and matches_reference and tiny"
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch

from nsa.bench.case import TORCH_DTYPES
from proofs.compile_report.report import GPUS, MODELS, compile_for, jobs
from proofs.ptx_emulator.cases import CASES, run_case
from proofs.ptx_emulator.counts import CLASSES, by_class, idle_stores, unknown_instructions
from proofs.ptx_emulator.driver import EmulatorDriver, emulated
from proofs.ptx_emulator.fault_drill import drill, load_faults, markdown, summary
from proofs.ptx_emulator.machine import Machine


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m proofs.ptx_emulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the cases, and the kernels that they run")
    run = commands.add_parser("run", help="run one case, or all, for a GPU")
    run.add_argument("case", choices=[*CASES, "all"])
    run.add_argument("--json", type=Path, help="write instruction counts here")
    ptx = commands.add_parser("ptx", help="print the PTX of a kernel as a case compiles it")
    ptx.add_argument("kernel")
    ptx.add_argument("--case", choices=CASES, required=True)
    faults = commands.add_parser("faults", help="plant faults in PTX and report which are caught")
    faults.add_argument("-k", dest="match", default="", help="only faults whose name contains this")
    faults.add_argument("--markdown", action="store_true", help="print the table of docs/kernels/EMULATOR.md")
    idle = commands.add_parser("idle-stores", help="run all cases and list the stores that stored nothing")
    unknown = commands.add_parser("unknown", help="compile every kernel and list what the emulator cannot execute")
    for command in (run, ptx, idle, unknown):
        command.add_argument("--gpu", default="sm_80", help="architecture to compile for (default: sm_80)")
        command.add_argument("--dtype", choices=TORCH_DTYPES, default="bf16")
    options = parser.parse_args(arguments)
    if options.command == "list":
        kernels = [job.kernel for job in jobs(MODELS["base"], "sm_80")]
        print(f"cases: {', '.join(CASES)}\nkernels: {', '.join(kernels)}")
        return 0
    if options.command == "faults":
        return _faults(options.match, as_markdown=options.markdown)
    dtype = TORCH_DTYPES[options.dtype]
    if options.command == "ptx":
        return _print_ptx(options.kernel, options.case, options.gpu, dtype)
    if options.command == "idle-stores":
        return _print_idle_stores(options.gpu, dtype)
    if options.command == "unknown":
        return _print_unknown(options.gpu)
    return _run(list(CASES) if options.case == "all" else [options.case], options.gpu, dtype, options.json)


def _run(names: list[str], gpu: str, dtype: torch.dtype, to: Path | None) -> int:
    good = True
    with emulated(gpu) as driver:
        for name in names:
            began = time.perf_counter()
            figures = run_case(name, dtype)
            findings = driver.log.take()
            right = all(figure.holds for figure in figures)
            good &= right and not findings
            numbers = ", ".join(f"{figure.claim} {figure.measured:.1e}" for figure in figures)
            took = time.perf_counter() - began
            print(f"{name}: {'right' if right else 'WRONG'}, {len(findings)} findings, {took:.1f} s: {numbers}")
            for finding in findings:
                print(f"  {finding}")
        counts = {kernel: by_class(opcodes) for kernel, opcodes in driver.instruction_counts().items()}
        _print_counts(counts, driver)
    if to is not None:
        to.write_text(json.dumps({"gpu": gpu, "warp_instructions": counts}, indent=1) + "\n")
    return 0 if good else 1


def _print_counts(counts: dict[str, dict[str, int]], driver: EmulatorDriver) -> None:
    print(f"\n{'warp instructions':28s}" + "".join(f"{name:>11s}" for name in CLASSES))
    for kernel, classes in counts.items():
        print(f"{kernel:28s}" + "".join(f"{classes[name]:11d}" for name in CLASSES))
    total = sum(sum(classes.values()) for classes in counts.values())
    print(f"{total} warp instructions in {driver.seconds:.1f} s of CPU time: {total / driver.seconds:.0f} per second")


def _print_ptx(kernel: str, case: str, gpu: str, dtype: torch.dtype) -> int:
    with emulated(gpu) as driver:
        run_case(case, dtype)
        texts = [text for (name, text) in driver.machines if name == kernel]
        if not texts:
            print(f"{case} has no kernel {kernel}, but: {', '.join(sorted({n for n, _ in driver.machines}))}")
            return 1
        print(texts[0])
    return 0


def _print_idle_stores(gpu: str, dtype: torch.dtype) -> int:
    with emulated(gpu) as driver:
        for name in CASES:
            run_case(name, dtype)
        by_name: dict[str, list[Machine]] = {}
        for (kernel, _), machine in driver.machines.items():
            by_name.setdefault(kernel, []).append(machine)
    total = 0
    idle: list[str] = []
    for kernel, variants in by_name.items():
        stores, copies = idle_stores(variants)
        total += copies
        idle += [f"{kernel}: {store}" for store in stores]
    print("\n".join([*idle, f"{len(idle)} of {total} copies of stores stored nothing in {len(CASES)} cases"]))
    return 0


def _print_unknown(gpu: str) -> int:
    for job in jobs(MODELS["base"], gpu):
        assembly = compile_for(job, GPUS[gpu]).asm
        if "ptx" not in assembly:
            print(f"{job.kernel}: no PTX: {gpu} has machine code of its own, of which nothing is emulated")
            continue
        counts = unknown_instructions(assembly["ptx"])
        print(f"{job.kernel}: {', '.join(f'{name} {n}' for name, n in sorted(counts.items())) or 'all known'}")
    return 0


def _faults(match: str, *, as_markdown: bool) -> int:
    faults, results = [fault for fault in load_faults() if match in fault.name], []
    for result in drill(faults):
        results.append(result)
        print(f"[{len(results):3d}/{len(faults)}] {result}", file=sys.stderr if as_markdown else sys.stdout, flush=True)
    if as_markdown:
        print(markdown(results))
        return 0
    print(summary(results))
    return 0 if all(result.caught or result.fault.missed_because for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
