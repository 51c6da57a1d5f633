"""Files for GitHub, Docker, editors and citations: they name what exists, and agree on the version."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

import nsa
import nsa_train

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
DOCKERFILES = sorted(ROOT.glob("Dockerfile*"))
PROJECTS = {
    name: tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
    for name in ("nsa-attention", "nsa-train")
}
EXTRAS = {extra for project in PROJECTS.values() for extra in project["optional-dependencies"]}
SHIPPED = ROOT / "packages/nsa-train/nsa_train/shipped"
IN_WHEELS = ["packages", *(str(link.resolve().relative_to(ROOT)) for link in SHIPPED.rglob("*") if link.is_symlink())]
# Paths and modules as they appear in commands.
PATH = re.compile(
    r"(?<![\w/$.-])(\.ci/\w+|packages/[\w/-]+\.py|constraints\.txt|CHANGELOG\.md|pyproject\.toml)(?![\w/])"
)


def steps(workflow: Path) -> list[dict]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def test_there_are_workflows_for_checks_docs_wheel_and_publishing():
    commands = " ".join(step.get("run", "") for workflow in WORKFLOWS for step in steps(workflow))
    for needed in (".ci/run", ".ci/nightly", "sphinx-build -W", "python -m build"):
        assert needed in commands
    assert [step["uses"] for step in steps(ROOT / ".github/workflows/publish.yml") if "pypi" in step.get("uses", "")]


def test_the_site_of_the_workflow_links_to_the_repository():
    """Sets only variables that docs/conf.py reads, so that a renamed one is noticed."""
    (build,) = [step for workflow in WORKFLOWS for step in steps(workflow) if "sphinx-build" in step.get("run", "")]
    assert list(build["env"]) == ["DOCS_REPOSITORY_URL"]
    assert 'os.environ.get("DOCS_REPOSITORY_URL"' in (ROOT / "docs/conf.py").read_text()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_names_files_that_exist(workflow):
    for step in steps(workflow):
        for name in PATH.findall(step.get("run", "")):
            assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_a_full_version_and_permissions_are_minimal(workflow):
    text = yaml.safe_load(workflow.read_text())
    for step in steps(workflow):
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+\.\d+\.\d+|[0-9a-f]{40})", step["uses"])
    assert text["permissions"] in ({}, {"contents": "read"})
    granted = [job.get("permissions", {}) for job in text["jobs"].values()]
    writes = [(name, level) for each in granted for name, level in each.items() if level == "write"]
    assert writes == ([("id-token", "write")] if workflow.stem == "publish" else [])
    assert all("timeout-minutes" in job for job in text["jobs"].values())


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed")
def test_actionlint_finds_nothing():
    done = subprocess.run(["actionlint", *WORKFLOWS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "file", [*WORKFLOWS, *DOCKERFILES, ROOT / ".devcontainer/devcontainer.json"], ids=lambda path: path.name
)
def test_extras_exist(file):
    named = {
        extra
        for group in re.findall(r"(?:nsa-attention|nsa-train)\[([\w,]+)\]", file.read_text())
        for extra in group.split(",")
    }
    assert named <= EXTRAS


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_copies_what_exists_and_docker_may_see(file):
    seen = (ROOT / ".dockerignore").read_text().splitlines()
    copied = [source for line in re.findall(r"^COPY (.*)$", file.read_text(), re.M) for source in line.split()[:-1]]
    assert all(any(Path(file).is_relative_to(source) for source in copied) for file in IN_WHEELS)
    for source in copied:
        assert (ROOT / source).exists()
        assert f"!{source}" in seen


def test_a_dockerfile_installs_the_torch_of_the_constraints():
    (torch,) = re.findall(r"^torch==\S+$", (ROOT / "constraints.txt").read_text(), re.M)
    for file in DOCKERFILES:
        assert re.search(rf"pip install .*{re.escape(torch)}$", file.read_text(), re.M)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(file):
    done = subprocess.run(["hadolint", file], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_devcontainer_names_a_stage_of_the_dockerfile():
    build = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())["build"]
    dockerfile = ROOT / ".devcontainer" / build["dockerfile"]
    assert re.search(rf"^FROM \S+ AS {build['target']}$", dockerfile.read_text(), re.M)


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda path: path.stem
)
def test_an_issue_form_has_what_github_requires(form):
    text = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= text.keys()
    for part in text["body"]:
        assert part["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert ("value" if part["type"] == "markdown" else "label") in part["attributes"]
    ids = [part["id"] for part in text["body"] if "id" in part]
    assert len(set(ids)) == len(ids)


def test_files_that_github_shows():
    for name in ("SECURITY.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE", ".github/PULL_REQUEST_TEMPLATE.md"):
        assert (ROOT / name).stat().st_size
    for project in PROJECTS:
        assert (ROOT / "packages" / project / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_every_file_states_the_same_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == nsa.__version__
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.M).group(1)
    assert newest in ("Unreleased", nsa.__version__)
    assert nsa_train.__version__ == nsa.__version__
    assert f"nsa-attention=={nsa.__version__}" in PROJECTS["nsa-train"]["dependencies"]
