"""Files that come with the package, found by name: example configs, two small English corpora and a small model.

The repository keeps each of them once, where the links in this folder point; a wheel carries the files.
"""

import os
from collections.abc import Iterable
from pathlib import Path

_FOLDER = Path(__file__).parent

CONFIGS = (_FOLDER / "configs").resolve()
"""Folder of the example configs, with the hardware profiles in `profiles/`."""
CORPUS = (_FOLDER / "text" / "debian_docs.parquet").resolve()
"""English documentation, 5 MB of text, in the columns of FineWeb-Edu."""
STORIES = (_FOLDER / "text" / "simple_stories.parquet").resolve()
"""Simple English stories, facts and questions, 4.6 MB of text, in the same columns: by `python -m tools.stories`."""
CORPORA = (CORPUS, STORIES)
CORPUS_LICENCES = (_FOLDER / "text" / "NOTICES.txt").resolve()

PRETRAINED = (_FOLDER / "pretrained").resolve()
"""A model of 4 million parameters, trained on simple stories, in Transformers' format."""


def config_names() -> list[str]:
    """Names of the example configs, without `.yaml`."""
    return sorted(file.stem for file in CONFIGS.glob("*.yaml"))


def config_text(name: str) -> str:
    return (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")


def config_file(name: str | Path) -> Path:
    """The config that a command names: a file, or a shipped one as `base_125m_8k` or `configs/base_125m_8k.yaml`."""
    return Path(name) if os.path.isfile(name) else _shipped(name, CONFIGS.glob("*.yaml"))


def text_source(spec: str) -> Path:
    """The text that a command names: a folder, file or pattern, or a shipped corpus as `debian_docs`."""
    return Path(spec) if os.path.exists(spec) else _shipped(spec, CORPORA)


def _shipped(name: str | Path, files: Iterable[Path]) -> Path:
    """The file of this stem, name, or folder and name; else the path as given, for the caller to refuse."""
    path = Path(name)
    names = ((file, (Path(file.stem), Path(file.name), Path(file.parent.name, file.name))) for file in files)
    return next((file for file, known in names if path in known), path)
