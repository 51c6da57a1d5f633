"""The bill of materials: valid CycloneDX, every locked package with its hashes, the same bytes each time."""

import json

import pytest

pytest.importorskip("cyclonedx", reason="in the dev extra")

from proofs.supply_chain.lock_files import GATE, read_lock
from proofs.supply_chain.sbom import as_json, bill_of_materials


@pytest.fixture(scope="module")
def text() -> str:
    return as_json(bill_of_materials(read_lock(GATE)))


def test_it_is_valid_cyclonedx(text):
    from cyclonedx.schema import SchemaVersion  # here: the schema's grammars take seconds to build at import
    from cyclonedx.validation.json import JsonStrictValidator

    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None


def test_packages_carry_version_licence_and_the_locked_hashes(text):
    lock, components = read_lock(GATE), {row["name"]: row for row in json.loads(text)["components"]}
    assert components.keys() <= lock.keys()
    assert {"torch", "pydantic", "pyyaml", "typer", "rich"} <= components.keys()
    for name, row in components.items():
        assert {entry["content"] for entry in row["hashes"]} == lock[name].hashes
        assert row["licenses"][0]["license"]["name"] != "unknown"
        assert row["purl"].startswith(f"pkg:pypi/{name}@")


def test_dependencies_between_packages_are_listed(text):
    needs = {row["ref"].partition("==")[0]: row.get("dependsOn", []) for row in json.loads(text)["dependencies"]}
    assert {"pydantic", "torch"} <= {ref.partition("==")[0] for ref in needs["nsa-train"]}


def test_the_same_environment_gives_the_same_bytes(text):
    assert as_json(bill_of_materials(read_lock(GATE))) == text
