"""Software bill of materials of the gate's environment: `python -m proofs.supply_chain.sbom FILE`.

CycloneDX 1.6 as JSON: this project and every package of `.ci/locks/gate.txt` with version, licence, the SHA-256 of the
files that may be installed, and which package needs which. The same environment gives the same bytes.
"""

import json
import sys
from importlib import metadata
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement

from proofs.supply_chain.licences import stated_licence
from proofs.supply_chain.lock_files import GATE, LockedPackage, normalized, read_lock

PROJECT = "nsa-train"


def bill_of_materials(lock: dict[str, LockedPackage]) -> Bom:
    """List the components: the installed packages among these, and this project."""
    ours = _component(PROJECT, metadata.version(PROJECT), ComponentType.APPLICATION)
    installed = {normalized(installation.metadata["Name"]): installation for installation in metadata.distributions()}
    components = {
        name: _component(name, installed[name].version, hashes=package.hashes)
        for name, package in lock.items()
        if name in installed
    }
    bom = Bom(components=components.values())
    bom.metadata.component = ours
    for name, component in {PROJECT: ours, **components}.items():
        needed = {normalized(Requirement(line).name) for line in installed[name].requires or []}
        bom.register_dependency(component, [components[other] for other in sorted(needed & components.keys())])
    return bom


def _component(
    name: str, version: str, kind: ComponentType = ComponentType.LIBRARY, hashes: frozenset[str] = frozenset()
) -> Component:
    return Component(
        name=name,
        version=version,
        type=kind,
        bom_ref=f"{name}=={version}",
        purl=PackageURL("pypi", name=name, version=version),
        licenses=[DisjunctiveLicense(name=stated_licence(name) or "unknown")],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=value) for value in sorted(hashes)],
    )


def as_json(bom: Bom) -> str:
    """Encode without time and random number, which CycloneDX does not require."""
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    document.pop("serialNumber", None)
    document["metadata"].pop("timestamp", None)
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def main(arguments: list[str]) -> int:
    (path,) = arguments
    text = as_json(bill_of_materials(read_lock(GATE)))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
