"""env.json names the code that ran."""

import json
import subprocess
from pathlib import Path

import pytest

from nsa.files import git_commit
from nsa_train.config.schema import RunConfig
from nsa_train.names import ENV
from nsa_train.record.run_folder import RunFolder


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path))
    root = tmp_path / "checkout"
    root.mkdir()
    (root / "code.py").write_text("x = 1\n")
    who = ["-c", "user.name=n", "-c", "user.email=e@x"]
    for words in (["init", "-q"], ["add", "code.py"], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=root, check=True, capture_output=True)
    return root


def test_a_checkout_is_named_by_its_commit_and_whether_it_was_modified(checkout):
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, capture_output=True, text=True).stdout.strip()
    assert git_commit(checkout / "code.py") == (commit, False)
    (checkout / "code.py").write_text("x = 2\n")
    assert git_commit(checkout / "code.py") == (commit, True)


def test_no_commit_is_named_where_there_is_no_checkout_or_no_git(checkout, tmp_path, monkeypatch):
    inside = checkout / "site-packages" / "module.py"
    inside.parent.mkdir()
    inside.touch()
    assert git_commit(inside) is None, "not the checkout that a package happens to be installed in"
    assert git_commit(tmp_path / "outside.py") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_commit(checkout / "code.py") is None


def test_env_json_has_it(tmp_path):
    RunFolder(tmp_path).write_env(RunConfig())
    env = json.loads((tmp_path / ENV).read_text())
    assert env["nsa"]
    commit = git_commit(Path(__file__))
    assert env["code"] == ({"commit": commit[0], "modified": commit[1]} if commit else {})
