"""`nsa demo`: prepare the shipped text, train a small model, report, generate, and draw what the layers selected.

It runs the commands that a user would type, prints each, and leaves out those whose results are there.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

import typer

from nsa.cli.init import write_starter
from nsa.cli.outputs import print_line
from nsa.cli.report import DEFAULT_NAME
from nsa.errors import ExitCode

STEPS_PER_MINUTE = 120
"""Steps of the demo's model that two idle cores compute in a minute, roughly."""
_PROMPT = "The "
_PICTURE = "selection.svg"
_INTERRUPTED = 130


def demo(
    folder: Path = typer.Argument(Path("nsa-demo"), metavar="FOLDER", help="Folder for everything the demo writes."),
    minutes: float = typer.Option(5.0, min=0.1, help="About how long to train on two idle cores."),
    steps: int = typer.Option(None, min=1, help="Training steps, instead of --minutes."),
) -> None:
    """Train a small model on a small corpus and show the results. Ctrl-C stops; the same command continues.

    **Examples:** `nsa demo`, shorter: `nsa demo my-demo --minutes 1`
    """
    from nsa.checkpoint.folder import CheckpointFolder
    from nsa.config.starter_config import (
        CONFIG_FILE,
        DATA_FOLDER,
        FIRST_CONFIG,
        RUN_FOLDER,
        TEXT_FOLDER,
        TOKENIZER_FILE,
        make_starter,
    )
    from nsa.data.shards.manifest import MANIFEST_NAME
    from nsa.names import CHECKPOINTS

    steps = steps or max(1, round(minutes * STEPS_PER_MINUTE))
    config, text, run = (folder / name for name in (CONFIG_FILE, TEXT_FOLDER, RUN_FOLDER))
    starter = make_starter(FIRST_CONFIG, folder, with_text=True)
    if not config.exists():
        write_starter(folder, starter, with_text=True)
        print_line(f"wrote {config} and a corpus in {text}")
    try:
        made_by = {"tokenizer": folder / TOKENIZER_FILE, "prepare": folder / DATA_FOLDER / MANIFEST_NAME}
        for words in map(shlex.split, starter.commands):
            if words[1] == "data" and not made_by[words[2]].exists():
                _run(words[1:])
        saved = CheckpointFolder(run / CHECKPOINTS).steps()
        if not saved or saved[-1] < steps:
            every = max(1, steps // 3)
            changes = [f"train.steps={steps}", f"train.save_every={every}", f"train.eval_every={every}"]
            _run(["train", str(config), *changes, *(["--resume"] if saved else [])])
        for step in CheckpointFolder(run / CHECKPOINTS).steps():
            at = ["--prompt", _PROMPT, "--temperature", "0.7", "--seed", "1", "-n", "60"]
            _run(["generate", str(run / CHECKPOINTS / f"step{step}"), *at])
        _run(["report", str(run)])
        _draw_selection(run, text, folder / _PICTURE)
    except (KeyboardInterrupt, typer.Abort):
        _say_how_to_continue()
        raise typer.Exit(_INTERRUPTED) from None
    print_line("")
    print_line(f"report: {run / DEFAULT_NAME} · picture: {folder / _PICTURE} (open them in a browser)")
    print_line("next, with your own text:")
    print_line("  nsa init my-run        # then put your text into my-run/text")
    for command in make_starter(FIRST_CONFIG, Path("my-run"), with_text=True).commands:
        print_line(f"  {command}")


def _run(words: Sequence[str]) -> None:
    """Print an `nsa` command and run it; a command that stops early ends the demo with its exit code."""
    from nsa.cli.main import app

    print_line(f"$ nsa {shlex.join(words)}")
    code = typer.main.get_command(app).main(args=list(words), prog_name="nsa", standalone_mode=False)
    if code:
        if code == ExitCode.PREEMPTED:
            _say_how_to_continue()
        raise typer.Exit(code)


def _say_how_to_continue() -> None:
    print_line("stopped: run the same command again to continue.")


def _draw_selection(run: Path, text: Path, picture: Path) -> None:
    from nsa.cli.model_options import open_model
    from nsa.data.source import open_source
    from nsa.infer.selection_map import selection_maps, text_rows, write_svg

    loaded = open_model(run, device=None, dtype=None, tokenizer=None, key_file=None)
    document = next(iter(open_source(str(text)).read(0)))
    maps = selection_maps(loaded, document.text)
    write_svg(maps, picture)
    print_line(f"blocks that queries selected (key blocks to the right, queries downwards), wrote {picture}:")
    rows = [text_rows(each) for each in maps]
    print_line("   ".join(f"layer {each.layer}".ljust(len(shown[0])) for each, shown in zip(maps, rows, strict=True)))
    for line in zip(*rows, strict=True):
        print_line("   ".join(line))
