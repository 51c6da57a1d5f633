"""`nsa train`: train a model, or resume training it."""

import shlex
from collections import deque
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from nsa.errors import ConfigError, ExitCode
from nsa_train.cli.config import resolve
from nsa_train.cli.early_checks import require_device_of, require_folder_and_data, require_training_packages
from nsa_train.cli.launch import CLEAR_HALT_HELP, INIT_FROM_HELP, RESUME_FROM_HELP, RESUME_HELP, launch_ranks
from nsa_train.cli.outputs import print_line
from nsa_train.cli.preflight import ALLOW_HELP
from nsa_train.cli.startup import imports_not_collected
from nsa_train.names import ENDINGS, PROGRESS, TOKENIZER
from nsa_train.terminal_text import duration, printable
from nsa_train.train.distributed import RankInfo
from nsa_train.train.start_options import StartOptions

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from nsa_train.record.heartbeat_record import HeartbeatRecord
    from nsa_train.train.callbacks.evaluation import EvaluationResult

_SEPARATOR = " · "
_LOSS_UNIT = "nats/token"
_SHORTEST_BAR, _LONGEST_BAR = 6, 30
_PACE_RECORDS = 100
_ARGUMENTS_HELP = "Config file or name of a shipped one (default: $CONFIG), then settings, e.g. train.lr=1e-4."


def train(
    arguments: list[str] = typer.Argument(None, metavar="CONFIG KEY=VALUE", help=_ARGUMENTS_HELP),
    resume: bool = typer.Option(False, "--resume", help=RESUME_HELP),
    resume_from: Path = typer.Option(None, "--resume-from", help=RESUME_FROM_HELP),
    init_from: Path = typer.Option(None, "--init-from", help=INIT_FROM_HELP),
    clear_halt: bool = typer.Option(False, "--clear-halt", help=CLEAR_HALT_HELP),
    steps: int = typer.Option(None, help="train.steps."),
    allow: list[str] = typer.Option([], "--allow", metavar="RULE", help=ALLOW_HELP),
    # Spellings of earlier versions (docs/OLDER_NAMES.md).
    dataset: str = typer.Option(None, hidden=True),
    precision: str = typer.Option(None, hidden=True),
    ddp: int = typer.Option(-1, hidden=True),
    fwe_report_docs: int = typer.Option(None, hidden=True),
    loader_timeout: float = typer.Option(None, hidden=True),
    synthetic_on_fail: bool = typer.Option(False, "--synthetic-on-fail", hidden=True),
) -> None:
    """Train until done or stopped. Exit codes: 0 done, 10 stopped, 11 halted, 20 config, 21 data, 22 checkpoint.

    A run that breaks rules of `nsa preflight` is refused with exit code 2, unless `--allow` names them.

    **Examples:** `nsa train cpu_quickstart`, and on several GPUs
    `torchrun --nproc_per_node=8 -m nsa_train.cli train train_50k parallel.data=fsdp --resume`
    """
    flags = {
        "data.dataset": dataset,
        "train.steps": steps,
        "runtime.precision": precision,
        "data.report_docs": fwe_report_docs,
        "data.loader_timeout_s": loader_timeout,
        "data.synthetic_on_fail": synthetic_on_fail or None,
    }
    words = [*(arguments or []), *(f"{key}={value}" for key, value in flags.items() if value is not None)]
    words, named = _split_off_checkpoint(words) if resume else (words, None)
    config = resolve(words)
    require_training_packages(config)
    if config.runtime.device != "auto":
        require_device_of("runtime.device", config.runtime.device)
    options = StartOptions(
        resume=resume,
        resume_from=_existing(resume_from or named),
        init_from=init_from,
        clear_halt=clear_halt,
        allow=tuple(allow),
    )
    options.require_folders(Path(config.train.out_dir))
    ranks = RankInfo.from_environment()
    if not ranks.distributed:
        require_folder_and_data(config, options)

    with imports_not_collected():
        from nsa_train.train.run import train as run

    if ddp == 0 and ranks.world > 1:
        raise ConfigError(
            f"--ddp 0 requires a single rank and torchrun started {ranks.world}. Omit --ddp, or start without torchrun."
        )
    if ddp == 1 and not ranks.distributed:
        import torch

        if (gpus := torch.cuda.device_count()) > 1:
            raise typer.Exit(launch_ranks(words, options, nproc=gpus))
    with closing(console_reporter()) as reporter:
        code = run(config, options, reporter, import_exported)
    if ranks.first:
        _print_next(code, Path(config.train.out_dir))
    raise typer.Exit(code)


def _print_next(code: int, folder: Path) -> None:
    """The commands to type after a run that is done; a run that stopped has said how to continue it."""
    if code == ExitCode.DONE:
        run = shlex.quote(str(folder))
        commands = [f'nsa generate {run} --prompt "The"'] if (folder / TOKENIZER).is_file() else []
        print_line(f"next: {', or '.join([*commands, f'nsa report {run}'])}")


def import_exported(folder: Path, out: Path, *, key: bytes | None) -> None:
    """`import_folder`, imported when it is needed: Transformers takes seconds to import."""
    from nsa_train.convert.import_folder import import_folder

    import_folder(folder, out, key=key)


def _split_off_checkpoint(words: list[str]) -> tuple[list[str], Path | None]:
    """`--resume PATH` is an older spelling of `--resume-from PATH`: a folder among the arguments is that path."""
    folders = [word for word in words if Path(word).is_dir() or word.endswith(".pt")]
    if len(folders) > 1:
        raise ConfigError(f"--resume was given {len(folders)} checkpoints ({', '.join(folders)}). Give one.")
    return [word for word in words if word not in folders], Path(folders[0]) if folders else None


def _existing(path: Path | None) -> Path | None:
    """Checkpoints were once files named NAME.pt and are now folders named NAME."""
    if path is not None and path.suffix == ".pt" and not path.exists() and path.with_suffix("").is_dir():
        return path.with_suffix("")
    return path


def console_reporter() -> "_PlainProgress":
    """A line that is updated in place on a terminal, else a line per record. Close it after the run."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    return _LiveProgress(console) if console.is_terminal and not console.is_dumb_terminal else _PlainProgress()


class _PlainProgress:
    """One line per record, for logs."""

    def __init__(self) -> None:
        self._pace = _RunPace()

    def line(self, text: str) -> None:
        print_line(text)

    def beat(self, beat: "HeartbeatRecord", steps: int) -> None:
        if beat.msg == PROGRESS:
            print(_progress(beat, steps, self._pace.seconds_left(beat, steps)), flush=True)
        elif beat.detail:
            self.line(f"{beat.msg} at step {beat.step}: {beat.detail}")

    def evaluation(self, result: "EvaluationResult") -> None:
        self.line(
            f"step {result.step} · held-out loss {result.val_loss:.4f} {_LOSS_UNIT} over {result.tokens:,} tokens · "
            f"accuracy {result.val_accuracy:.2%}"
        )

    def close(self) -> None:
        """Leave the terminal as it was."""


class _LiveProgress(_PlainProgress):
    """Progress on a terminal: a bar on one line that is updated in place, with permanent lines printed above it."""

    def __init__(self, console: "Console") -> None:
        from rich.live import Live

        super().__init__()
        self._console, self._live = console, Live("", console=console, auto_refresh=False)

    def line(self, text: str) -> None:
        self._console.print(printable(text))

    def beat(self, beat: "HeartbeatRecord", steps: int) -> None:
        if beat.msg == PROGRESS:
            self._live.start()
            text = _progress(beat, steps, self._pace.seconds_left(beat, steps), self._console.width)
            self._live.update(_with_bar(text, beat.step / steps, self._console.width), refresh=True)
        else:
            super().beat(beat, steps)
        if beat.step >= steps or beat.msg in ENDINGS:
            self._live.stop()

    def close(self) -> None:
        self._live.stop()


class _RunPace:
    """Estimates the time left from the newest records of this process, evaluations and saves between them included."""

    def __init__(self) -> None:
        self._records: deque[tuple[int, float]] = deque(maxlen=_PACE_RECORDS)

    def seconds_left(self, beat: "HeartbeatRecord", steps: int) -> float | None:
        """None for the first record, whose only step also prepared data and kernels."""
        while self._records and self._records[-1][0] >= beat.step:  # the run was rolled back
            self._records.pop()
        left_s = None
        if self._records:
            step, ts = self._records[0]
            left_s = (steps - beat.step) * max(0.0, beat.ts - ts) / (beat.step - step)
        self._records.append((beat.step, beat.ts))
        return left_s


def _with_bar(text: str, share: float, width: int) -> "RenderableType":
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 1))
    room = min(_LONGEST_BAR, width - len(text) - 1)
    bar = [ProgressBar(total=1.0, completed=share, width=room)] if room >= _SHORTEST_BAR else []
    line.add_row(*bar, Text(text, no_wrap=True, overflow="crop"))
    return line


def _progress(beat: "HeartbeatRecord", steps: int, left_s: float | None, width: int | None = None) -> str:
    """One line about a step; in a terminal only the parts that fit `width`, the first ones first.

    The speed of the first step of a process, for which there is no `left_s`, is that of its preparations.
    """
    parts = {
        "step": f"step {beat.step}/{steps}",
        "loss": f"loss {beat.loss:.4f} {_LOSS_UNIT}",
        **({"speed": f"{beat.toks_per_s or 0:,.0f} tokens/s"} if left_s is not None else {}),
        "lr": f"lr {beat.lr:.2e}",
        "grad": f"grad {beat.grad_norm or 0:.3f}",
        **({"left": f"{duration(left_s)} left"} if left_s is not None else {}),
    }
    bar = _SHORTEST_BAR + 1
    for least, reserve in (("lr", bar), ("grad", bar), ("left", 0), ("loss", 0)):
        if width is not None and len(_SEPARATOR.join(parts.values())) > width - reserve:
            parts.pop(least, None)
    return _SEPARATOR.join(parts.values())
