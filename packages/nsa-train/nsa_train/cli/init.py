"""`nsa init`: write a folder with a commented config, and with a small corpus if requested."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from nsa.errors import ConfigError, OutputError
from nsa_train.cli.outputs import print_line, require_writable_folder

if TYPE_CHECKING:
    from nsa_train.config.starter_config import StarterConfig

_NOTICES = "NOTICES.txt"


def init(
    folder: Path = typer.Argument(None, metavar="FOLDER", help="Folder to write; created if it does not exist."),
    config: str = typer.Option(
        None, "--config", metavar="NAME", help="Shipped config to start from. Default: a first model for a CPU."
    ),
    text: bool = typer.Option(False, "--text", help="Also write a small corpus: 5 MB of English documentation."),
    list_configs: bool = typer.Option(False, "--list", help="Print the shipped configs and exit."),
) -> None:
    """Write a folder for a run: a commented config.yaml and, with --text, a small corpus. Prints what to run next.

    **Examples:** `nsa init my-run --text`, and for a long run `nsa init big --config base_125m_8k`
    """
    from nsa_train.config.starter_config import CONFIG_FILE, FIRST_CONFIG, TEXT_FOLDER, make_starter

    if list_configs:
        _print_configs()
        return
    if folder is None:
        raise ConfigError("no folder was given. Name one, e.g. `nsa init my-run`; `--list` prints the shipped configs.")
    starter = make_starter(config or FIRST_CONFIG, folder)
    write_starter(folder, starter, with_text=text)
    print_line(f"wrote {folder / CONFIG_FILE}" + (f" and a corpus in {folder / TEXT_FOLDER}" if text else ""))
    if starter.reads_text and not text:
        print_line(f"put your text into {folder / TEXT_FOLDER}, then (`nsa init FOLDER --text` writes a small corpus):")
    else:
        print_line("next:")
    for command in starter.commands:
        print_line(f"  {command}")


def write_starter(folder: Path, starter: "StarterConfig", *, with_text: bool) -> None:
    """Write config, text folder and, if requested, the corpus with its licences. Nothing is overwritten."""
    from nsa.files import create_atomic
    from nsa_train.config.starter_config import CONFIG_FILE, TEXT_FOLDER
    from nsa_train.shipped import CORPUS, CORPUS_LICENCES

    texts = folder / TEXT_FOLDER
    copies = {texts / CORPUS.name: CORPUS, folder / _NOTICES: CORPUS_LICENCES} if with_text else {}
    require_writable_folder(folder)
    if existing := [str(path) for path in (folder / CONFIG_FILE, *copies) if path.exists()]:
        raise OutputError(
            f"{', '.join(existing)} already exists: nsa init overwrites nothing. Name another folder, or move it away."
        )
    new_folder = texts if with_text or starter.reads_text else folder
    new_folder.mkdir(parents=True, exist_ok=True)
    for target, source in copies.items():
        shutil.copyfile(source, target)
    create_atomic(folder / CONFIG_FILE, starter.text)


def _print_configs() -> None:
    from nsa_train.config.starter_config import shipped_configs

    old = False
    for each in shipped_configs():
        if each.for_earlier_runs and not old:
            old = True
            print_line("")
            print_line("kept for scripts and earlier runs; start new runs from those above:")
        print_line(each.name)
        print_line(f"  {each.purpose}")
        print_line(f"  hardware: {each.hardware}")
