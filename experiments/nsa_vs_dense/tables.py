"""The tables of the study: which runs belong to each, and where they are kept.

tables.yaml names for each table the config file, the seeds and, per variant, the settings it changes. A run is the
command `nsa train CONFIG SETTING=VALUE … train.seed=SEED train.out_dir=FOLDER`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from nsa import names
from nsa.config.load import load

HERE = Path(__file__).parent
RUNS = Path("artifacts/nsa_vs_dense")
"""Relative to the working folder, as every path in the configs."""


@dataclass(frozen=True)
class StudyRun:
    table: str
    variant: str
    seed: int
    config: Path
    settings: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return RUNS / self.table / f"{self.variant}_{self.seed}"

    @property
    def command(self) -> list[str]:
        """Arguments of `nsa`; the run goes on from its newest checkpoint if it has one."""
        own = (f"train.seed={self.seed}", f"train.out_dir={self.folder}")
        resume = ("--resume",) if (self.folder / names.CHECKPOINTS).exists() else ()
        return ["train", str(self.config), *self.settings, *own, *resume]

    @property
    def selects(self) -> bool:
        """Whether any of its layers chooses blocks."""
        return bool({"nsa", "global"} & set(load(self.config, overrides=self.settings).model.attention))

    @property
    def finished(self) -> bool:
        return (self.folder / names.MODEL_SAFETENSORS).exists()


@dataclass(frozen=True)
class StudyTable:
    name: str
    question: str
    drawn: Literal["accuracy", "loss"]
    """Of the held-out rows, over steps."""
    runs: tuple[StudyRun, ...]

    def chosen(self, variants: list[str] | None, seeds: list[int] | None) -> list[StudyRun]:
        """The runs of these variants and seeds, all if None; seeds change slowest, so that first results come early."""
        wanted = [
            run
            for run in self.runs
            if (variants is None or run.variant in variants) and (seeds is None or run.seed in seeds)
        ]
        return sorted(wanted, key=lambda run: run.seed)


def read_tables(path: Path = HERE / "tables.yaml") -> dict[str, StudyTable]:
    tables: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {name: _table(name, given, path.parent) for name, given in tables.items()}


def _table(name: str, given: dict[str, Any], folder: Path) -> StudyTable:
    always = tuple(given.get("settings", ()))
    runs = tuple(
        StudyRun(name, variant, seed, folder / given["config"], (*always, *settings))
        for variant, settings in given["variants"].items()
        for seed in given["seeds"]
    )
    return StudyTable(name, given["question"], given["drawn"], runs)
