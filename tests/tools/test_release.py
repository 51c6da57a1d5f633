"""A release's files: one version everywhere, a dated changelog, and pages whose links work on the package index."""

import datetime
import re
import shutil
import tomllib

import pytest

import nsa
from tests.docs.blocks import ROOT
from tools import release

REPOSITORY = "https://example.org/group/project"
DAY = datetime.date(2031, 5, 6)


@pytest.fixture
def copy(tmp_path):
    """The files that name the version, and the changelog, in a folder of their own."""
    for name in (*release.VERSION_LINES, "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def test_prepare_writes_the_version_everywhere_and_a_dated_heading(copy):
    assert set(release.prepare(copy, "9.8.7", DAY)) == {*release.VERSION_LINES, "CHANGELOG.md"}
    for name, pattern in release.VERSION_LINES.items():
        assert re.findall(pattern, (copy / name).read_text()) == ["9.8.7"]
    changes = (copy / "CHANGELOG.md").read_text()
    assert "## [Unreleased]\n\n## [9.8.7] - 2031-05-06\n" in changes
    assert changes.replace("## [9.8.7] - 2031-05-06\n\n", "") == (ROOT / "CHANGELOG.md").read_text()
    assert "date-released: 2031-05-06\n" in (copy / "CITATION.cff").read_text()


def test_a_later_release_replaces_the_date_of_the_citation(copy):
    release.prepare(copy, "9.8.7", DAY)
    release.prepare(copy, "9.8.8", DAY + datetime.timedelta(1))
    assert (copy / "CITATION.cff").read_text().count("date-released") == 1


def test_what_is_released_is_not_prepared_again(copy):
    release.prepare(copy, "9.8.7", DAY)
    before = (copy / "CHANGELOG.md").read_text()
    with pytest.raises(SystemExit, match=r"9\.8\.7.*released"):
        release.prepare(copy, "9.8.7", DAY)
    with pytest.raises(SystemExit, match="not a version"):
        release.prepare(copy, "v9.9", DAY)
    assert (copy / "CHANGELOG.md").read_text() == before


def test_the_changelog_has_one_heading_for_what_is_not_released():
    first, *released = re.findall(r"(?m)^## (.*)$", (ROOT / "CHANGELOG.md").read_text())
    assert first == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in released), released


def test_nothing_is_written_if_a_file_does_not_name_its_version(copy):
    (copy / "CITATION.cff").write_text("title: none\n")
    with pytest.raises(SystemExit, match=r"CITATION\.cff"):
        release.prepare(copy, "9.8.7", DAY)
    assert nsa.__version__ in (copy / "packages/nsa-train/pyproject.toml").read_text()


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    return {folder.name: folder for folder in release.stage(tmp_path_factory.mktemp("staged"), f"{REPOSITORY}/")}


def test_every_link_of_the_published_pages_is_absolute_and_leads_to_a_file(staged):
    for name in release.PACKAGES:
        text = re.sub(r"^```.*?^```$", "", (staged[name] / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
        targets = re.findall(r"\]\(([^)\s]+)\)", text)
        assert len(targets) > 4
        assert [target for target in targets if not target.startswith("https://")] == []
        of_files = [target for target in targets if re.match(rf"{REPOSITORY}/(raw|blob)/", target)]
        tag = f"v{nsa.__version__}/"
        assert all((ROOT / target.partition(tag)[2]).exists() for target in of_files)
        assert any("/raw/" in target and target.endswith(".svg") for target in of_files)


def test_the_badges_lead_to_the_workflows(staged):
    text = (staged["nsa-train"] / "README.md").read_text()
    address = f"{REPOSITORY}/actions/workflows/ci.yml"
    assert f"[![CI]({address}/badge.svg)]({address})" in text


def test_code_of_the_page_is_unchanged(staged):
    fence = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
    assert fence.findall((staged["nsa-train"] / "README.md").read_text()) == fence.findall(
        (ROOT / "README.md").read_text()
    )


def test_the_metadata_have_the_addresses_of_the_project(staged):
    for folder in staged.values():
        urls = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["urls"]
        assert {"Homepage", "Documentation", "Issues", "Changelog", "Paper"} == urls.keys()
        assert urls["Homepage"] == REPOSITORY


def test_shipped_files_are_copied_not_linked(staged):
    assert not [path for folder in staged.values() for path in folder.rglob("*") if path.is_symlink()]
    assert (staged["nsa-train"] / "nsa_train/shipped/configs/base_1b_32k.yaml").is_file()
