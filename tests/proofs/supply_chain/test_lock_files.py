"""Lock files of the gate: every package pinned to hashes, and what is installed here is what they name."""

import json
import os
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement

from proofs.supply_chain.lock_files import BUILD, GATE, INSTALLER, ROOT, VLLM, LockFileError, normalized, read_lock
from proofs.supply_chain.write_locks import local_requirements

PYPROJECTS = [
    tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text()) for name in ("nsa-attention", "nsa-train")
]
PROJECTS = {each["project"]["name"]: each["project"] for each in PYPROJECTS}
HASH = "0" * 64


def requirements() -> list[Requirement]:
    """Requirements of both packages and of the extras that the gate installs, of other extras through them."""
    extras, wanted = [("nsa-train", "dev"), ("nsa-train", "train")], []
    lines = [line for project in PROJECTS.values() for line in project["dependencies"]]
    while lines or extras:
        if not lines:
            name, extra = extras.pop()
            lines = list(PROJECTS[name]["optional-dependencies"][extra])
            continue
        requirement = Requirement(lines.pop())
        if requirement.name in PROJECTS:
            extras += [(requirement.name, extra) for extra in requirement.extras]
        else:
            wanted.append(requirement)
    return wanted


@pytest.mark.parametrize("path", [GATE, BUILD, INSTALLER, VLLM], ids=lambda path: path.stem)
def test_every_package_has_one_version_and_hashes(path):
    assert read_lock(path)


def test_the_gate_installs_a_permitted_version_of_every_requirement():
    lock = read_lock(GATE)
    for requirement in requirements():
        package = lock[normalized(requirement.name)]
        assert package.version in requirement.specifier, f"{requirement}: locked {package.version}"


def test_locks_are_written_for_the_packages_of_this_checkout():
    """By folder: an index has neither, and one requires the other."""
    local = {requirement.name: requirement for requirement in map(Requirement, local_requirements())}
    assert local.keys() == PROJECTS.keys()
    for name, requirement in local.items():
        assert requirement.url == (ROOT / "packages" / name).as_uri()
        assert requirement.extras <= PROJECTS[name]["optional-dependencies"].keys()


def test_the_build_backend_is_locked():
    backend = [Requirement(line) for each in PYPROJECTS for line in each["build-system"]["requires"]]
    assert all(read_lock(BUILD)[requirement.name].version in requirement.specifier for requirement in backend)


@pytest.mark.skipif(not os.environ.get("CI"), reason="only the gate's environment is made from the lock")
def test_the_gate_runs_with_what_is_locked():
    lock = read_lock(GATE)
    # In a process of its own: setuptools, once imported, adds the packages that it carries along to the path.
    command = [sys.executable, "-m", "pip", "list", "--format", "json"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    installed = {normalized(row["name"]): row["version"] for row in json.loads(listed)}
    assert {name: installed.get(name) for name in lock} == {name: package.version for name, package in lock.items()}
    outside = installed.keys() - lock.keys() - read_lock(INSTALLER).keys()
    assert outside <= {"nsa-attention", "nsa-train", "pip", "setuptools"}


def test_the_gate_installs_from_nothing_else():
    """Every install command of the gate checks hashes, or installs this checkout without its dependencies."""
    for script in ("steps.sh", "install-vllm"):
        commands = [
            line
            for line in (ROOT / ".ci" / script).read_text().splitlines()
            if "pip" in line and " install " in line and not line.lstrip().startswith("#")
        ]
        assert commands
        for command in commands:
            assert "--require-hashes" in command or "--no-deps --build-constraint" in command, command


@pytest.mark.parametrize(
    "text", ["typer>=0.15\n", "typer==0.15\n", f"typer --hash=sha256:{HASH}\n", f"a==1 --hash=sha256:{HASH}\n" * 2,
             f"typer==0.15 --hash=sha256:{HASH[1:]}\n", f"typer==0.15 --hash=md5:{HASH}\n", "-r other.txt\n"],
)  # fmt: skip
def test_a_line_without_version_or_hash_is_refused(tmp_path, text):
    (tmp_path / "lock.txt").write_text(text)
    with pytest.raises(LockFileError, match="Write it again"):
        read_lock(tmp_path / "lock.txt")


def test_a_file_with_another_hash_is_not_installed(tmp_path):
    wheel = tmp_path / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny.py", "")
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "")
    (tmp_path / "lock.txt").write_text(f"tiny==1.0 --hash=sha256:{HASH}\n")
    command = [sys.executable, "-m", "pip", "install", "--require-hashes", "--no-index", "--find-links", str(tmp_path)]
    command += ["--target", str(tmp_path / "to"), "--requirement", str(tmp_path / "lock.txt")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "DO NOT MATCH THE HASHES" in result.stderr
    assert not (tmp_path / "to" / "tiny.py").exists()
