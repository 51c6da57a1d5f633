"""The wheels work without the checkout: init, prepare, train, generate and verify, also as an ordinary user with no
compiler on PATH and a home folder that cannot be written.
"""

import json
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from nsa.kernels.cpu.build import library
from tests.wheel_install import ROOT, WheelInstall, build_wheels, ordinary_user

MOST_BYTES = 15_000_000
SHIPPED = "nsa_train/shipped/"
# A few steps instead of minutes; a nightly test of the tutorial runs the command as it is printed.
FEW_STEPS = " train.steps=4 train.warmup_steps=1 train.log_every=2 train.eval_every=4 train.eval_batches=2"
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"


def next_commands(output: str) -> list[str]:
    """The commands that `nsa init` printed."""
    return [line.strip() for line in output.splitlines() if line.startswith("  nsa ")]


def test_the_wheels_are_small_and_carry_the_package_every_config_and_the_corpus(wheels):
    assert wheels.library.stat().st_size + wheels.trainer.stat().st_size < MOST_BYTES
    content = {}
    for wheel, package in ((wheels.library, "nsa/"), (wheels.trainer, "nsa_train/")):
        with zipfile.ZipFile(wheel) as archive:
            content |= {name: archive.read(name) for name in archive.namelist()}
            assert all(name.startswith(package) or ".dist-info/" in name for name in archive.namelist())
    shipped = {name.removeprefix(SHIPPED): data for name, data in content.items() if name.startswith(SHIPPED)}
    sources = {f"configs/{file.relative_to(ROOT / 'configs')}": file for file in (ROOT / "configs").rglob("*.yaml")}
    text = ROOT / "packages/nsa-train/nsa_train/shipped/text"
    texts = ("debian_docs.parquet", "simple_stories.parquet", "NOTICES.txt", "README.md")
    sources |= {f"text/{name}": text / name for name in texts}
    sources |= {f"pretrained/{file.name}": file for file in (text.parent / "pretrained").iterdir()}
    for name, file in sources.items():
        assert shipped.pop(name) == file.read_bytes()
    assert list(shipped) == ["__init__.py"]


def test_two_builds_are_the_same_bytes(wheels, tmp_path):
    """The second one from files with other times and modes, in another folder and order."""
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in reversed(tracked.rstrip("\0").split("\0")):
        source, copy = ROOT / name, tmp_path / "elsewhere" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            copy.symlink_to(source.readlink())
        elif source.is_file():
            shutil.copyfile(source, copy)
            copy.chmod(0o755 if os.access(source, os.X_OK) else 0o600)
            os.utime(copy, (10**9, 10**9))
    again = build_wheels(tmp_path, tmp_path / "elsewhere")
    for name in ("library", "trainer"):
        first, second = getattr(wheels, name), getattr(again, name)
        assert first.name == second.name
        assert first.read_bytes() == second.read_bytes()


def test_the_checkout_is_not_seen(installed, tmp_path):
    code = "import json, nsa, nsa_train.shipped as s; print(json.dumps([nsa.__file__, str(s.CONFIGS), str(s.CORPUS)]))"
    paths = json.loads(installed.run(f"{installed.venv}/bin/python -c '{code}'", tmp_path))
    assert all(Path(path).is_relative_to(installed.venv) for path in paths)
    assert all(Path(path).exists() for path in paths)


def test_a_config_with_a_profile_is_valid_outside_the_checkout(installed, tmp_path):
    installed.run("nsa init big --config base_1b_32k && nsa config check big/config.yaml", tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_an_ordinary_user_without_compiler_and_with_a_read_only_home(whole, installed, tmp_path):
    """whole: also generate with and verify what was trained; tests/docs/test_user_pages.py does so with a compiler."""
    user = ordinary_user(installed)
    work, home = user.folder_for(tmp_path / "work"), user.folder_for(tmp_path / "home")
    home.chmod(0o555)
    printed = next_commands(user.run("nsa init my-run --text", work, home=home))
    assert [command.split()[1] for command in printed] == ["data", "data", "train", "generate"]
    tokenizer, prepare, train, generate = printed
    user.run(tokenizer, work, home=home)
    user.run(prepare, work, home=home)
    trained = user.run(train + FEW_STEPS, work, home=home)
    assert "kernels: portable, all branches" in trained
    assert "no C++ compiler" in trained
    if whole:
        text = user.run(f"{generate} -n 20", work, home=home)
        assert text.splitlines()[-1].startswith("prompt 4 tokens") or "new 20 tokens" in text
        assert "good" in user.run("nsa checkpoint verify my-run/run", work, home=home)
    assert not list(home.iterdir())


@pytest.mark.skipif(shutil.which("g++", path=SYSTEM_PATH) is None, reason="no g++")
@pytest.mark.parametrize("built", [True, pytest.param(False, marks=[pytest.mark.nightly, pytest.mark.timeout(900)])])
def test_kernels_are_kept_in_a_temporary_folder_if_home_is_read_only(built, installed, tmp_path):
    user = ordinary_user(installed)
    work, home = user.folder_for(tmp_path / "work"), user.folder_for(tmp_path / "home")
    home.chmod(0o555)
    cache = work / f"nsa-kernels-{user.user or os.geteuid()}"
    if built:  # compiling takes minutes on a busy machine: use what this one has compiled, from the same sources
        shutil.copy(library(), user.folder_for(cache))
        cache.chmod(0o700)
    output = user.run("nsa doctor", work, path=SYSTEM_PATH, home=home, timeout_s=800).replace("\n", "")
    assert f"compiled in {cache}" in output
    assert len(list(cache.glob("nsa_cpu_*.so"))) == 1


def _python(version: str) -> str | None:
    interpreters = sorted(Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python{version}"))
    return str(interpreters[-1]) if interpreters else shutil.which(f"python{version}")


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_a_newer_python_trains_from_the_wheels(version, wheels, tmp_path):
    """Installs everything from the package index; only where it has a build of torch for CPUs."""
    python = _python(version)
    if python is None:
        pytest.skip(f"Python {version} is not installed")
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    pip = [tmp_path / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet"]
    constraints = ["--constraint", ROOT / "constraints.txt"]
    report = tmp_path / "report.json"
    asked = subprocess.run(
        [*pip, "--dry-run", "--report", report, *constraints, "torch"], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        pytest.skip(f"torch cannot be installed for Python {version}: {asked.stderr.strip().splitlines()[-1]}")
    chosen = {item["metadata"]["name"] for item in json.loads(report.read_text())["install"]}
    if gpu := sorted(name for name in chosen if name.startswith("nvidia-")):
        pytest.skip(f"torch for Python {version} is a GPU build here: it needs {gpu[0]} and {len(gpu) - 1} more")
    subprocess.run([*pip, *constraints, wheels.library, f"{wheels.trainer}[train]"], check=True)
    other = WheelInstall(tmp_path / "venv")
    tokenizer, prepare, train, generate = next_commands(other.run("nsa init my-run --text", tmp_path))
    for command in (tokenizer, prepare, train + FEW_STEPS, f"{generate} -n 20", "nsa checkpoint verify my-run/run"):
        other.run(command, tmp_path, path=SYSTEM_PATH)
