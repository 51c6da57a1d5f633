"""Licences of what the gate installs: known, accepted, listed."""

import os

import pytest

from proofs.supply_chain import licences
from proofs.supply_chain.lock_files import GATE, read_lock


def test_every_installed_package_states_an_accepted_licence():
    assert licences.problems() == []


def test_every_locked_package_is_on_the_page():
    rows = [line for line in licences.PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == sorted(read_lock(GATE))


@pytest.mark.skipif(not os.environ.get("CI"), reason="only the gate's environment has every locked package")
def test_the_page_is_what_the_packages_state():
    assert licences.PAGE.read_text() == licences.page()


@pytest.mark.parametrize(
    ("expression", "accepted"),
    [("MIT", True), ("MIT AND BSD-3-Clause", True), ("GPL OR BSD", True), ("MPL-2.0 AND MIT", True), ("", False),
     ("GPL-3.0-only", False), ("MIT AND AGPL-3.0-only", False), ("Proprietary", False), ("SSPL-1.0 OR GPL", False)],
)  # fmt: skip
def test_alternatives_and_parts(expression, accepted):
    assert licences.is_accepted(expression) is accepted


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ("License-Expression: MIT-0\nLicense: GPL\n", "MIT-0"),
        ("License: Apache License, Version 2.0\n", "Apache-2.0"),
        ("License: BSD-2-Clause\nClassifier: License :: OSI Approved :: BSD License\n", "BSD-2-Clause"),
        ("Classifier: License :: OSI Approved :: GNU General Public License (GPL)\n", "GPL"),
        ("License: see the website\n", ""),
        ("", ""),
    ],
)
def test_what_metadata_states(tmp_path, monkeypatch, fields, licence):
    folder = tmp_path / "stated-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: stated\nVersion: 1.0\n{fields}")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert licences.stated_licence("stated") == licence
