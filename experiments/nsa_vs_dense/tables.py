"""The tables of the study: which runs belong to each, and where they are kept.

tables.yaml names for each table the config file, the seeds and, per variant, the settings it changes. A run is the
command `nsa train CONFIG SETTING=VALUE … train.seed=SEED train.out_dir=FOLDER`. The runs of a table with
`starts_from: TABLE` have that table's variants and begin with the weights of its runs.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import yaml

from nsa_train import names
from nsa_train.config.load import load

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
    starts_from: Path | None = None
    """Folder of the run whose weights it begins with."""

    @property
    def folder(self) -> Path:
        return RUNS / self.table / f"{self.variant}_{self.seed}"

    @property
    def command(self) -> list[str]:
        """Arguments of `nsa`; the run goes on from its newest checkpoint if it has one."""
        own = (f"train.seed={self.seed}", f"train.out_dir={self.folder}")
        start: tuple[str, ...] = ()
        if (self.folder / names.CHECKPOINTS).exists():
            start = ("--resume",)
        elif self.starts_from is not None:
            start = ("--init-from", str(self.starts_from))
        return ["train", str(self.config), *self.settings, *own, *start]

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
    studies: dict[str, StudyTable] = {}
    for name, section in tables.items():
        studies[name] = _table(name, section, path.parent, studies)
    return studies


def _table(name: str, section: dict[str, Any], folder: Path, earlier: dict[str, StudyTable]) -> StudyTable:
    always = tuple(section.get("settings", ()))
    if "starts_from" in section:
        runs = tuple(
            replace(run, table=name, settings=_merged(run.settings, always), starts_from=run.folder)
            for run in earlier[section["starts_from"]].chosen(section["variants"], section["seeds"])
        )
    else:
        runs = tuple(
            StudyRun(name, variant, seed, folder / section["config"], (*always, *settings))
            for variant, settings in section["variants"].items()
            for seed in section["seeds"]
        )
    return StudyTable(name, section["question"], section["drawn"], runs)


def _merged(settings: tuple[str, ...], changed: tuple[str, ...]) -> tuple[str, ...]:
    """SETTING=VALUE words; a setting that is named twice has its last value."""
    return tuple({word.split("=")[0]: word for word in (*settings, *changed)}.values())
