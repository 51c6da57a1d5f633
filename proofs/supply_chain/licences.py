"""Licences of the packages that the gate installs: `python -m proofs.supply_chain.licences [--check]`.

Writes docs/reference/LICENCES.md from the metadata of the installed packages. Fails if a package states no licence that
is known, or one that a program under Apache-2.0 cannot be distributed with.
"""

import re
import sys
from importlib import metadata
from pathlib import Path

from proofs.supply_chain.lock_files import GATE, ROOT, normalized, read_lock

PAGE = ROOT / "docs" / "reference" / "LICENCES.md"
PERMISSIVE = frozenset(
    {
        *("0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0"),
        *("CC0-1.0", "CNRI-Python", "ISC", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Zlib", "public domain"),
    }
)
BY_FILE = frozenset({"LGPL-2.1-or-later", "MPL-2.0"})
"""Copyleft for the library's own files; used unmodified as separate packages, and none is in our wheel."""

_CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD",
    "GNU General Public License (GPL)": "GPL",
    "GNU Lesser General Public License v2 or later (LGPLv2+)": "LGPL-2.1-or-later",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Public Domain": "public domain",
    "Python Software Foundation License": "PSF-2.0",
}
_FREE_TEXT = {
    r"Apache( License)?( Version)? ?2?(\.0)?( License)?": "Apache-2.0",
    r"(3-Clause )?BSD( License)?": "BSD",
    r"(The )?MIT( License)?( \(MIT\))?": "MIT",
}
_BEGINNINGS = {"Apache License Version 2.0": "Apache-2.0", "The MIT License (MIT)": "MIT"}


def stated_licence(package: str) -> str:
    """Return the licence that an installed package states, as an SPDX expression where it gives one; empty if nothing
    is understood."""
    fields = metadata.metadata(package)
    if "License-Expression" in fields:
        return fields["License-Expression"]
    text = " ".join(fields["License"].split()) if "License" in fields else ""
    if text and is_accepted(text):
        return text
    classifiers = [line.rpartition(" :: ")[2] for line in fields.get_all("Classifier") or [] if "License ::" in line]
    if named := [_CLASSIFIERS[name] for name in classifiers if name in _CLASSIFIERS]:
        return " OR ".join(named)
    for pattern, licence in _FREE_TEXT.items():
        if re.fullmatch(pattern, text.replace(",", ""), re.IGNORECASE):
            return licence
    return next((licence for beginning, licence in _BEGINNINGS.items() if text.startswith(beginning)), "")


def is_accepted(expression: str) -> bool:
    """Whether all parts of one alternative are licences that may be used here."""
    return any(
        all(part.strip() in PERMISSIVE | BY_FILE for part in alternative.split(" AND "))
        for alternative in expression.split(" OR ")
    )


def problems() -> list[str]:
    """Installed packages of the gate's lock without an accepted licence."""
    licences = {name: stated_licence(name) for name in _installed()}
    return [
        f"{name}: {licence or 'states no licence that is known'}. Replace the package, or name its licence in "
        f"{Path(__file__).relative_to(ROOT)}"
        for name, licence in licences.items()
        if not is_accepted(licence)
    ]


def page() -> str:
    rows = [f"| {name} | {stated_licence(name)} |" for name in _installed()]
    return (
        "# Licences of dependencies\n\n"
        "Every package that CI installs for training, evaluation, serving, docs and tests (`.ci/locks/gate.txt`),\n"
        "with the licence that its metadata states. `BSD` is a package that does not say which BSD licence. None is\n"
        "part of our wheel; `pip install nsa-train` needs only the few that [DEPENDENCIES](../DEPENDENCIES.md) lists\n"
        "without an extra, and what they need. Accepted are permissive licences and, for packages used unmodified,\n"
        "MPL-2.0 and LGPL. Written by `python -m proofs.supply_chain.licences`.\n\n"
        "| package | licence |\n|---|---|\n" + "\n".join(rows) + "\n"
    )


def _installed() -> list[str]:
    present = {normalized(package.metadata["Name"]) for package in metadata.distributions()}
    return sorted(present & read_lock(GATE).keys())


def main(arguments: list[str]) -> int:
    if missing := sorted(read_lock(GATE).keys() - set(_installed())):
        sys.stderr.write(f"not installed: {', '.join(missing)}. Install what .ci/run does.\n")
        return 1
    if messages := problems():
        sys.stderr.write("\n".join(messages) + "\n")
        return 1
    if "--check" in arguments:
        return 0 if PAGE.exists() and PAGE.read_text(encoding="utf-8") == page() else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
