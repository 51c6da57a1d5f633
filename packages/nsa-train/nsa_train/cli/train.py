"""`nsa train`: train a model, or resume training it."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nsa.errors import ConfigError
from nsa_train.cli.config import resolve
from nsa_train.cli.launch import CLEAR_HALT_HELP, INIT_FROM_HELP, RESUME_FROM_HELP, RESUME_HELP, launch_ranks
from nsa_train.cli.outputs import print_line
from nsa_train.cli.preflight import ALLOW_HELP
from nsa_train.cli.startup import imports_not_collected
from nsa_train.names import PROGRESS
from nsa_train.terminal_text import printable
from nsa_train.train.start_options import StartOptions

if TYPE_CHECKING:
    from nsa_train.record.heartbeat_record import HeartbeatRecord
    from nsa_train.train.callbacks.evaluation import EvaluationResult
    from nsa_train.train.run_outputs import RunReporter

_SEPARATOR = " · "
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

    with imports_not_collected():
        from nsa_train.train.distributed import RankInfo
        from nsa_train.train.run import train as run

    ranks = RankInfo.from_environment()
    options = StartOptions(
        resume=resume,
        resume_from=_existing(resume_from or named),
        init_from=init_from,
        clear_halt=clear_halt,
        allow=tuple(allow),
    )
    options.require_resume_folder()
    if ddp == 0 and ranks.world > 1:
        raise ConfigError(
            f"--ddp 0 requires a single rank and torchrun started {ranks.world}. Omit --ddp, or start without torchrun."
        )
    if ddp == 1 and not ranks.distributed and (gpus := _gpus()) > 1:
        raise typer.Exit(launch_ranks(words, options, nproc=gpus))
    raise typer.Exit(run(config, options, console_reporter(), import_exported))


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


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def console_reporter() -> "RunReporter":
    """A line that is updated in place on a terminal, else a line per record."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=True)
    return _LiveProgress(console) if console.is_terminal else _PlainProgress()


class _PlainProgress:
    """One line per record, for logs."""

    def line(self, text: str) -> None:
        print_line(text)

    def beat(self, beat: "HeartbeatRecord", steps: int) -> None:
        if beat.msg == PROGRESS:
            print(_progress(beat, steps), flush=True)
        elif beat.detail:
            print_line(f"{beat.msg} at step {beat.step}: {beat.detail}")

    def evaluation(self, result: "EvaluationResult") -> None:
        print(_evaluation(result), flush=True)


class _LiveProgress(_PlainProgress):
    """Progress on a terminal: one line that is updated in place, with permanent lines printed above it."""

    def __init__(self, console: Any) -> None:
        from rich.live import Live

        self._console, self._live = console, Live("", console=console, auto_refresh=False)

    def line(self, text: str) -> None:
        self._console.print(printable(text))

    def beat(self, beat: "HeartbeatRecord", steps: int) -> None:
        if beat.msg != PROGRESS:
            self._live.stop()
            if beat.detail:
                self._console.print(printable(f"{beat.msg} at step {beat.step}: {beat.detail}"))
            return
        self._live.start()
        self._live.update(_progress(beat, steps, self._console.width), refresh=True)
        if beat.step >= steps:
            self._live.stop()

    def evaluation(self, result: "EvaluationResult") -> None:
        self._console.print(_evaluation(result))


def _evaluation(result: "EvaluationResult") -> str:
    return (
        f"step {result.step} · held-out loss {result.val_loss:.4f} over {result.tokens} tokens · accuracy "
        f"{result.val_accuracy:.2%}"
    )


def _progress(beat: "HeartbeatRecord", steps: int, width: int | None = None) -> str:
    """One line about a step; in a terminal only the parts that fit `width`, the first ones first."""
    left_s = (steps - beat.step) * (beat.step_s or 0.0)
    eta = time.strftime("%H:%M:%S", time.gmtime(left_s)) if left_s < 86400 else f"{left_s / 86400:.1f} days"
    parts = [
        f"step {beat.step}/{steps}",
        f"loss {beat.loss:.4f}",
        f"{beat.toks_per_s or 0:,.0f} tokens/s",
        f"lr {beat.lr:.2e}",
        f"grad {beat.grad_norm or 0:.3f}",
        f"left {eta}",
    ]
    for least in ("lr ", "grad ", "left ", "loss "):
        if width is not None and len(_SEPARATOR.join(parts)) > width:
            parts = [part for part in parts if not part.startswith(least)]
    return _SEPARATOR.join(parts)
