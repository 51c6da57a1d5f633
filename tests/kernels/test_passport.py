"""The Triton kernels, compiled for GPUs that are not here: what the machine code shows must not get worse."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PASSPORTS = ROOT / "docs" / "kernels" / "passport.json"

pytest.importorskip("triton", reason="it is in the dev extra")

# Compiling and interpreting exclude each other in one process.
_INSPECT = """
import json, sys
from dataclasses import asdict
from nsa.kernels.triton.passport import MODELS, inspect, jobs
model, device = sys.argv[1:]
print(json.dumps([asdict(inspect(job, model, device)) for job in jobs(MODELS[model])]))
"""


def inspected(model: str, device: str) -> list[dict]:
    environ = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", _INSPECT, model, device]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict] = json.loads(done.stdout)
    return found


def test_what_is_written_down_has_no_fault_on_nvidia_and_those_on_amd_are_listed():
    from nsa.kernels.triton.passport import DEVICES, MODELS, Passport

    page = PASSPORTS.with_suffix(".md").read_text()
    entries = [Passport(**entry) for entry in json.loads(PASSPORTS.read_text())]
    assert {(p.model, p.device) for p in entries} >= {
        (model, device) for model in MODELS for device in ("sm_80", "sm_90", "sm_100", "gfx942")
    }
    assert all(p.device in DEVICES for p in entries)
    for p in entries:
        assert not (p.spilled_bytes and p.device.startswith("sm_")), p
        assert all(f"{p.kernel}, {p.model}, {p.device}: {fault}" in page for fault in p.faults())
        assert p.shared_bytes <= p.shared_limit, p


@pytest.mark.parametrize(
    ("model", "device"),
    [
        ("seed", "sm_80"),
        *(
            pytest.param(model, device, marks=pytest.mark.slow)
            for model in ("seed", "paper")
            for device in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
            if (model, device) != ("seed", "sm_80")
        ),
    ],
)
def test_the_machine_code_is_as_good_as_it_was(model, device):
    written = {
        e["kernel"]: e for e in json.loads(PASSPORTS.read_text()) if (e["model"], e["device"]) == (model, device)
    }
    for found in inspected(model, device):
        before = written[found["kernel"]]
        assert found["spilled_bytes"] <= before["spilled_bytes"]
        assert found["shared_bytes"] <= min(found["shared_limit"], before["shared_bytes"])
        assert found["registers"] <= before["registers"] + 8, "more registers: look at it, then write the passport anew"
        assert bool(found["async_copies"]) == bool(before["async_copies"]), "the software pipeline"
        assert found["matrix"].keys() == before["matrix"].keys()
