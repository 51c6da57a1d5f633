"""Compile every Triton kernel for every GPU of the table, read the machine code, write docs/kernels/passport.{json,md}.

    python scripts/write_kernel_passport.py [sm_80 sm_90 …]

Needs no GPU; about four seconds a kernel. GPUs that are not named keep their entries.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from nsa.kernels.triton.gpus import GPUS
from nsa.kernels.triton.passport import MODELS, CompileReport, inspect, jobs

FOLDER = Path(__file__).parents[1] / "docs" / "kernels"


def known() -> list[CompileReport]:
    file = FOLDER / "passport.json"
    return [CompileReport.from_json(entry) for entry in json.loads(file.read_text())] if file.exists() else []


def table(passports: list[CompileReport]) -> str:
    lines = [
        "# Kernel passports",
        "",
        "Machine code of every Triton kernel, compiled ahead of time in bf16 and read, never run here. Written by",
        "`python scripts/write_kernel_passport.py`. Seed: 12 heads, 2 groups, 64/64; paper: 64, 4, 192/128.",
        "Spilled: bytes to memory; on AMD also vector and scalar registers moved to other registers. Copies: the",
        "asynchronous ones, in every loop that multiplies tiles (gfx942 has none). How tiles are chosen:",
        "[tuning.md](tuning.md).",
        "",
        "| kernel | model | GPU | tile | registers | spilled | shared / limit | matrix | copies | programs/unit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for p in passports:
        code = p.code
        matrix = ", ".join(f"{n} {kind}" for kind, n in code.matrix.items()) or "–"
        shared = f"{code.shared_bytes / 1024:.0f} / {GPUS[p.gpu].shared_limit // 1024} KiB"
        spilled = f"{code.spilled_bytes} B"
        if code.vector_spills or code.scalar_spills:
            spilled += f", {code.vector_spills} vector, {code.scalar_spills} scalar"
        lines.append(
            f"| {p.kernel} | {p.model} | {p.gpu} | {p.tile} | {code.registers} | {spilled} | {shared} "
            f"| {matrix} | {code.async_copies} | {p.programs_per_unit} |"
        )
    faults = [f"- {p.kernel}, {p.model}, {p.gpu}: {fault}" for p in passports for fault in p.faults()]
    return "\n".join([*lines, "", "## Faults", "", *(faults or ["None."])]) + "\n"


def main(gpus: list[str]) -> None:
    passports = {name: [p for p in known() if p.gpu == name] for name in GPUS}
    FOLDER.mkdir(parents=True, exist_ok=True)
    for gpu in gpus:
        passports[gpu] = []
        for model, sizes in MODELS.items():
            for job in jobs(sizes, gpu):
                passport = inspect(job, model, gpu)
                passports[gpu].append(passport)
                print(f"{passport.kernel} {model} {gpu}: {', '.join(passport.faults()) or 'no faults'}", flush=True)
        entries = [p for name in GPUS for p in passports[name]]
        (FOLDER / "passport.json").write_text(json.dumps([asdict(p) for p in entries], indent=1) + "\n")
        (FOLDER / "passport.md").write_text(table(entries))


if __name__ == "__main__":
    main(sys.argv[1:] or list(GPUS))
