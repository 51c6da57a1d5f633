"""Commands for a first run: `nsa init` writes its folder, `nsa demo` takes one from text to report.

The demo runs the commands that a user would type, prints each, and leaves out those whose results are there.
"""

import shlex
import shutil
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from nsa.errors import ConfigError, ExitCode, OutputError
from nsa_train.cli.early_checks import DEMO_PACKAGES, require_packages
from nsa_train.cli.outputs import print_line, require_writable_folder
from nsa_train.cli.report import DEFAULT_NAME

if TYPE_CHECKING:
    from nsa_train.config.starter_config import StarterConfig
    from nsa_train.record.heartbeat_record import HeartbeatRecord
    from nsa_train.train.callbacks.evaluation import EvaluationResult
    from nsa_train.train.run_outputs import RunReporter

_NOTICES = "NOTICES.txt"
_STEPS_PER_MINUTE = 600 / 7
"""Training steps for each minute of the whole command: 600 steps took 7 min 17 s on two cores, compiling included."""
_PROMPTS = ("Once upon a time", "The", "What do cows eat?")
"""What a person would type; samples during training continue the first."""
_TEMPERATURE, _SEED = 0.5, 1
_SAMPLE_TOKENS, _LAST_TOKENS = 40, 80
_PICTURE = "selection.svg"
_INTERRUPTED = 130


def init(
    folder: Path = typer.Argument(None, metavar="FOLDER", help="Folder to write; created if it does not exist."),
    config: str = typer.Option(
        None, "--config", metavar="NAME", help="Shipped config to start from. Default: a first model for a CPU."
    ),
    text: bool = typer.Option(False, "--text", help="Also write a small corpus: 5 MB of simple English."),
    list_configs: bool = typer.Option(False, "--list", help="Print the shipped configs and exit."),
) -> None:
    """Write a folder for a run: a commented config.yaml and, with --text, a small corpus. Prints what to run next.

    **Examples:** `nsa init my-run --text`, and for a long run `nsa init big --config base_125m_8k`
    """
    from nsa_train.config.starter_config import CONFIG_FILE, FIRST_CONFIG, TEXT_FOLDER, make_starter, shipped_configs

    if list_configs:
        for each in shipped_configs():
            print_line(each.name)
            print_line(f"  {each.purpose}")
            print_line(f"  hardware: {each.hardware}")
        return
    if folder is None:
        raise ConfigError("no folder was given. Name one, e.g. `nsa init my-run`; `--list` prints the shipped configs.")
    starter = make_starter(config or FIRST_CONFIG, folder)
    _write_starter(folder, starter, with_text=text)
    print_line(f"wrote {folder / CONFIG_FILE}" + (f" and a corpus in {folder / TEXT_FOLDER}" if text else ""))
    if starter.reads_text and not text:
        print_line(f"put your text into {folder / TEXT_FOLDER}, then (`nsa init FOLDER --text` writes a small corpus):")
    else:
        print_line("next:")
    for command in starter.commands:
        print_line(f"  {command}")


def _write_starter(folder: Path, starter: "StarterConfig", *, with_text: bool) -> None:
    """Write config, text folder and, if requested, the corpus with its licences. Nothing is overwritten."""
    from nsa.files import create_atomic
    from nsa_train.config.starter_config import CONFIG_FILE, TEXT_FOLDER
    from nsa_train.shipped import CORPUS_LICENCES

    texts = folder / TEXT_FOLDER
    copies = {texts / starter.corpus.name: starter.corpus, folder / _NOTICES: CORPUS_LICENCES} if with_text else {}
    require_writable_folder(folder)
    if existing := [path.name for path in (folder / CONFIG_FILE, *copies) if path.exists()]:
        raise OutputError(
            f"{folder} already holds {', '.join(existing)}: nsa init overwrites nothing. Name another folder, or move "
            "this one away."
        )
    new_folder = texts if with_text or starter.reads_text else folder
    new_folder.mkdir(parents=True, exist_ok=True)
    for target, source in copies.items():
        shutil.copyfile(source, target)
    create_atomic(folder / CONFIG_FILE, starter.text)


def demo(
    context: typer.Context,
    folder: Path = typer.Argument(Path("nsa-demo"), metavar="FOLDER", help="Folder for everything the demo writes."),
    minutes: float = typer.Option(7.0, min=0.1, help="About how long the demo takes on two idle cores."),
    steps: int = typer.Option(None, min=1, help="Training steps, instead of --minutes."),
) -> None:
    """Train a small model on a small corpus and show the results. Ctrl-C stops; the same command continues.

    **Examples:** `nsa demo`, shorter: `nsa demo my-demo --minutes 1`
    """
    require_packages(*DEMO_PACKAGES)

    from nsa_train.checkpoint.folder import CheckpointFolder
    from nsa_train.config.starter_config import (
        CONFIG_FILE,
        DATA_FOLDER,
        FIRST_CONFIG,
        RUN_FOLDER,
        TEXT_FOLDER,
        TOKENIZER_FILE,
        make_starter,
    )
    from nsa_train.data.shards.manifest import MANIFEST_NAME
    from nsa_train.names import CHECKPOINTS

    steps = steps or max(1, round(minutes * _STEPS_PER_MINUTE))
    config, text, run = (folder / name for name in (CONFIG_FILE, TEXT_FOLDER, RUN_FOLDER))
    starter = make_starter(FIRST_CONFIG, folder)
    if not config.exists():
        _write_starter(folder, starter, with_text=True)
        print_line(f"wrote {config} and a corpus in {text}")
    try:
        outputs = {"tokenizer": folder / TOKENIZER_FILE, "prepare": folder / DATA_FOLDER / MANIFEST_NAME}
        for words in map(shlex.split, starter.commands):
            if words[1] == "data" and not outputs[words[2]].exists():
                _run_command(context, words[1:])
        saved = CheckpointFolder(run / CHECKPOINTS).steps()
        if not saved or saved[-1] < steps:
            every = max(1, steps // 3)
            changes = [f"train.steps={steps}", f"train.save_every={every}", f"train.eval_every={every}"]
            _train([str(config), *changes], run / CHECKPOINTS, resume=bool(saved))
        sampling = ["--temperature", str(_TEMPERATURE), "--seed", str(_SEED), "-n", str(_LAST_TOKENS)]
        prompts = [word for prompt in _PROMPTS for word in ("--prompt", prompt)]
        _run_command(context, ["generate", str(run), *prompts, *sampling])
        _run_command(context, ["report", str(run)])
        _draw_selection(run, text, folder / _PICTURE)
    except (KeyboardInterrupt, typer.Abort):
        _say_how_to_continue()
        raise typer.Exit(_INTERRUPTED) from None
    print_line("")
    print_line(f"report: {run / DEFAULT_NAME} · picture: {folder / _PICTURE} (open them in a browser)")
    print_line("next, with your own text:")
    print_line("  nsa init my-run        # then put your text into my-run/text")
    for command in make_starter(FIRST_CONFIG, Path("my-run")).commands:
        print_line(f"  {command}")


def _run_command(context: typer.Context, words: Sequence[str]) -> None:
    """Print an `nsa` command and run it; a command that stops early ends the demo with its exit code."""
    print_line(f"$ nsa {shlex.join(words)}")
    _require_done(context.find_root().command.main(args=list(words), prog_name="nsa", standalone_mode=False))


def _train(words: Sequence[str], checkpoints: Path, *, resume: bool) -> None:
    """`nsa train` with samples of text."""
    from nsa_train.cli.config import resolve
    from nsa_train.cli.train import console_reporter, import_exported
    from nsa_train.train.run import train
    from nsa_train.train.start_options import StartOptions

    print_line(f"$ nsa train {shlex.join([*words, *(['--resume'] if resume else [])])}")
    with closing(console_reporter()) as console:
        reporter = _SampleReporter(console, checkpoints)
        code = train(resolve(list(words)), StartOptions(resume=resume), reporter, import_exported)
    _require_done(code)


def _require_done(code: int | None) -> None:
    if code:
        if code == ExitCode.PREEMPTED:
            _say_how_to_continue()
        raise typer.Exit(code)


def _say_how_to_continue() -> None:
    print_line("stopped: run the same command again to continue.")


class _SampleReporter:
    """Console output of a run that also continues a prompt with every checkpoint saved while it trains."""

    def __init__(self, console: "RunReporter", checkpoints: Path) -> None:
        from nsa_train.checkpoint.folder import CheckpointFolder
        from nsa_train.infer.generate import silence_transformers  # takes seconds: not between two steps

        silence_transformers()
        self._console, self._checkpoints = console, CheckpointFolder(checkpoints)
        self._shown = set(self._checkpoints.steps())

    def line(self, text: str) -> None:
        self._show_samples()
        self._console.line(text)

    def beat(self, beat: "HeartbeatRecord", steps: int) -> None:
        self._console.beat(beat, steps)
        self._show_samples()

    def evaluation(self, result: "EvaluationResult") -> None:
        self._console.evaluation(result)
        self._show_samples()

    def _show_samples(self) -> None:
        """Checkpoints are written in the background, so the sample may come some steps after the save."""
        for step in self._checkpoints.committed_steps():
            if step not in self._shown:
                self._shown.add(step)
                self._console.line(f"step {step} writes: {self._sample(step)}")

    def _sample(self, step: int) -> str:
        from nsa_train.infer.load_model import load_model

        loaded = load_model(self._checkpoints.step_path(step), device="cpu")
        written = loaded.generate(_PROMPTS[0], temperature=_TEMPERATURE, seed=_SEED, max_new_tokens=_SAMPLE_TOKENS)
        return " ".join(f"{_PROMPTS[0]}{written}".split()) + " …"


def _draw_selection(run: Path, text: Path, picture: Path) -> None:
    from nsa_train.cli.model_options import open_model
    from nsa_train.data.source.resolve import open_source
    from nsa_train.infer.selection_map import selection_maps, side_by_side, write_svg

    loaded = open_model(run, device=None, dtype=None, tokenizer=None, key_file=None)
    document = next(iter(open_source(str(text)).read(0)))
    maps = selection_maps(loaded, document.text)
    write_svg(maps, picture)
    print_line(f"blocks that queries selected (key blocks to the right, queries downwards), wrote {picture}:")
    for line in side_by_side(maps, shutil.get_terminal_size().columns):
        print_line(line)
