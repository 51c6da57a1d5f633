"""`nsa launch`: train on several ranks, restarted from the last checkpoint after failures."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nsa import errors
from nsa.errors import NSAError
from nsa_train.cli.config import resolve
from nsa_train.cli.early_checks import require_training_packages
from nsa_train.cli.outputs import print_line
from nsa_train.cli.preflight import ALLOW_HELP
from nsa_train.train.start_options import StartOptions

if TYPE_CHECKING:
    from nsa_train.config import RunConfig

RESUME_HELP = "Resume from the newest good checkpoint of the run folder."
RESUME_FROM_HELP = "Resume from this checkpoint or run folder."
INIT_FROM_HELP = (
    "Start a new run at step 0 with the weights of this run, checkpoint, or folder in Transformers' format. The data "
    "may be other data with the same tokenizer."
)
CLEAR_HALT_HELP = "Move a .HALT file of an earlier run aside and start."


def launch(
    arguments: list[str] = typer.Argument(None, metavar="CONFIG KEY=VALUE", help="As for `nsa train`."),
    nproc: int = typer.Option(1, "--nproc", help="Ranks on this node, one per GPU."),
    nnodes: str = typer.Option("1", "--nnodes", help="Number of nodes, or min:max. Run the same command on each."),
    rdzv_endpoint: str = typer.Option(None, "--rdzv-endpoint", help="HOST:PORT of the rendezvous of several nodes."),
    rdzv_id: str = typer.Option("", "--rdzv-id", help="Id of this start, e.g. a job id; the same on all nodes."),
    listen: str = typer.Option(None, "--listen", help="Address of this node, of several; default: by its route."),
    resume: bool = typer.Option(False, "--resume", help=RESUME_HELP),
    resume_from: Path = typer.Option(None, "--resume-from", help=RESUME_FROM_HELP),
    init_from: Path = typer.Option(None, "--init-from", help=INIT_FROM_HELP),
    grace: float = typer.Option(300.0, "--grace", help="Seconds the ranks may take to save and exit when stopped."),
    clear_halt: bool = typer.Option(False, "--clear-halt", help=CLEAR_HALT_HELP),
    allow: list[str] = typer.Option([], "--allow", metavar="RULE", help=ALLOW_HELP),
) -> None:
    """Train on several ranks; restart from the last checkpoint after failures that may pass.

    Gives up after 3 cycles without a new checkpoint. Exit codes are those of `nsa train`: 0 done, 10 stopped, 11
    halted, 20 config, … Logs of every rank are in the run folder, under logs/.

    **Example:** `nsa launch --nproc 8 train_50k parallel.data=fsdp`
    """
    options = StartOptions(
        resume=resume, resume_from=resume_from, init_from=init_from, clear_halt=clear_halt, allow=tuple(allow)
    )
    wanted: dict[str, Any] = dict(
        nproc=nproc, nnodes=nnodes, rdzv_endpoint=rdzv_endpoint, rdzv_id=rdzv_id, listen=listen
    )
    raise typer.Exit(launch_ranks(list(arguments or []), options, **wanted, grace_s=grace))


def launch_ranks(words: list[str], options: StartOptions, *, nproc: int, **more: Any) -> int:
    """Check config and preflight rules here, then launch ranks of `nsa train`; returns the exit code. `more`: fields of
    `LaunchSettings`."""
    config = resolve(words)  # a wrong config is reported here, before any rank starts
    require_training_packages(config)

    from nsa_train.planning.preflight_rules import check_names
    from nsa_train.train.launch.launcher import LaunchSettings
    from nsa_train.train.launch.launcher import launch as run

    check_names(options.allow)
    options.require_folders(Path(config.train.out_dir))
    settings = LaunchSettings(
        command=[sys.executable, "-m", "nsa_train.cli", "train", *words],
        run_folder=Path(config.train.out_dir),
        nproc=nproc,
        start=options.without_clear_halt(),
        **more,
    )
    _require_preflight(words, nproc, settings.nodes(), options)
    if options.clear_halt:  # once: a file that appears later, before a restart included, stops the run
        _clear_halt(settings.run_folder)
    return run(settings, lambda text: print_line(f"launch: {text}"), _show)


def _require_preflight(words: list[str], nproc: int, nodes: tuple[int, int], options: StartOptions) -> None:
    """Raise with every preflight rule that this run breaks, before any rank starts.

    In a separate process: querying a GPU takes some of its memory, and the launcher lives as long as the run.
    """
    from nsa.child_process import ChildFailed, ChildProcess

    with ChildProcess("preflight", ("-m", "nsa_train.cli.launch")) as child:
        start = dict(resume=options.resuming, clear_halt=options.clear_halt, allow=options.allow)
        child.send(words=words, nproc=nproc, nodes=nodes, start=start)
        try:
            refusals = list(child.messages())
        except ChildFailed as error:
            raise NSAError(f"{error}. No rank was started. `nsa preflight` runs the same checks.") from error
    for refusal in refusals:
        raise getattr(errors, refusal["error"])(refusal["text"])


def _answer(
    send: Callable[..., None], words: list[str], nproc: int, nodes: tuple[int, int], start: dict[str, Any]
) -> None:
    """Answer in the child: send the error of the preflight rules, if any."""
    try:
        _check(resolve(words), nproc, nodes, StartOptions(**start))
    except NSAError as error:
        send(error=type(error).__name__, text=str(error))


def _check(config: "RunConfig", nproc: int, nodes: tuple[int, int], options: StartOptions) -> None:
    from nsa_train.train.datasets import remote_address
    from nsa_train.train.gather_preflight_facts import require_preflight, smallest_world

    # Held-out rows take time to read. A node that joins later finds the checkpoints of the run that it joins.
    left_to_ranks = ("held_out", "other_run") if nodes[1] > 1 else ("held_out",)
    # A path that does not exist before the first start is a mistake; a server may answer at the next attempt.
    local = remote_address(config) is None
    world = smallest_world(config, nproc, nodes)
    require_preflight(config, world, options, look_for_data=local, look_for_store=True, left_to_ranks=left_to_ranks)


def _clear_halt(folder: Path) -> None:
    from nsa_train.record import halt_file
    from nsa_train.record.run_folder import RunFolder

    if aside := halt_file.clear(folder, now=time.time(), step=RunFolder(folder).last_step()):
        print_line(f"launch: moved the existing .HALT to {aside}")


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    from nsa.child_process import answer_parent

    answer_parent(_answer)
