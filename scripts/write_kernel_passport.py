"""Compile every Triton kernel for every GPU of the table, read the machine code, write docs/kernels/passport.{json,md}.

    python scripts/write_kernel_passport.py [sm_80 sm_90 …]

Needs no GPU; about four seconds a kernel. Devices that are not named keep their entries.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from nsa.kernels.triton.passport import DEVICES, MODELS, Passport, inspect, jobs

FOLDER = Path(__file__).parents[1] / "docs" / "kernels"


def known() -> dict[tuple[str, str, str], Passport]:
    file = FOLDER / "passport.json"
    entries = [Passport(**entry) for entry in json.loads(file.read_text())] if file.exists() else []
    return {(p.model, p.device, p.kernel): p for p in entries}


def table(passports: list[Passport]) -> str:
    lines = [
        "# Kernel passports",
        "",
        "Machine code of every Triton kernel, compiled ahead of time in bf16 and read, never run here. Written by",
        "`python scripts/write_kernel_passport.py`. Seed: 12 heads, 2 groups, 64/64; paper: 64, 4, 192/128.",
        "",
        "| kernel | model | GPU | tile | registers | spilled | shared / limit | matrix | copies | programs/unit |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for p in passports:
        matrix = ", ".join(f"{n} {kind}" for kind, n in p.matrix.items()) or "–"
        shared = f"{p.shared_bytes / 1024:.0f} / {p.shared_limit // 1024} KiB"
        lines.append(
            f"| {p.kernel} | {p.model} | {p.device} | {p.tile} | {p.registers} | {p.spilled_bytes} B | {shared} "
            f"| {matrix} | {p.async_copies} | {p.programs_per_unit} |"
        )
    faults = [(p, fault) for p in passports for fault in p.faults()]
    lines += ["", "## Faults", "", *(f"- {p.kernel}, {p.model}, {p.device}: {fault}" for p, fault in faults)]
    return "\n".join(lines if faults else [*lines, "None."]) + "\n"


def main(devices: list[str]) -> None:
    passports = known()
    for model in MODELS:
        for job in jobs(MODELS[model]):
            for device in devices:
                passports[model, device, job.kernel] = passport = inspect(job, model, device)
                print(f"{passport.kernel} {model} {device}: {', '.join(passport.faults()) or 'no faults'}", flush=True)
    order = list(DEVICES)
    entries = sorted(passports.values(), key=lambda p: (order.index(p.device), p.model != "seed"))
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "passport.json").write_text(json.dumps([asdict(p) for p in entries], indent=1) + "\n")
    (FOLDER / "passport.md").write_text(table(entries))


if __name__ == "__main__":
    main(sys.argv[1:] or list(DEVICES))
