"""Files that come with the package: the example configs and a small English corpus with its licences.

The repository keeps each of them once. A wheel carries them in this folder (`force-include` in pyproject.toml); in a
checkout, or an editable install of one, they are read from where the repository keeps them.
"""

from pathlib import Path

_PACKAGED = Path(__file__).parent
_CHECKOUT = _PACKAGED.parents[1]


def _shipped(in_wheel: str, in_checkout: str) -> Path:
    packaged = _PACKAGED / in_wheel
    return packaged if packaged.exists() else _CHECKOUT / in_checkout


CONFIGS = _shipped("configs", "configs")
"""Folder of the example configs, with the hardware profiles in `profiles/`."""
CORPUS_IN_CHECKOUT = "tests/data/fixtures/debian_docs.parquet"
"""Path of the corpus as configs and docs name it, relative to a checkout."""
CORPUS = _shipped("text/debian_docs.parquet", CORPUS_IN_CHECKOUT)
"""English documentation, 5 MB of text, in the columns of FineWeb-Edu."""
CORPUS_LICENCES = _shipped("text/NOTICES.txt", "tests/data/fixtures/NOTICES.txt")


def config_names() -> list[str]:
    """Names of the example configs, without `.yaml`."""
    return sorted(file.stem for file in CONFIGS.glob("*.yaml"))


def config_text(name: str) -> str:
    return (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
