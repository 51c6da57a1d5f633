"""Files that come with the package: the example configs and a small English corpus with its licences.

The repository keeps each of them once, where the links in this folder point; a wheel carries the files.
"""

from pathlib import Path

_FOLDER = Path(__file__).parent

CONFIGS = (_FOLDER / "configs").resolve()
"""Folder of the example configs, with the hardware profiles in `profiles/`."""
CORPUS_IN_CHECKOUT = "packages/nsa-train/nsa_train/shipped/text/debian_docs.parquet"
"""Path of the corpus as configs and docs name it, relative to a checkout."""
CORPUS = (_FOLDER / "text" / "debian_docs.parquet").resolve()
"""English documentation, 5 MB of text, in the columns of FineWeb-Edu."""
CORPUS_LICENCES = (_FOLDER / "text" / "NOTICES.txt").resolve()


def config_names() -> list[str]:
    """Names of the example configs, without `.yaml`."""
    return sorted(file.stem for file in CONFIGS.glob("*.yaml"))


def config_text(name: str) -> str:
    return (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
