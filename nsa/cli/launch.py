"""`nsa launch`: several ranks that are watched and started again from the last checkpoint."""

import multiprocessing
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nsa.cli.config import resolve
from nsa.cli.preflight import ALLOW_HELP
from nsa.cli.terminal import say

if TYPE_CHECKING:
    from nsa.config import RunConfig


def launch(
    arguments: list[str] = typer.Argument(None, metavar="CONFIG KEY=VALUE", help="As for `nsa train`."),
    nproc: int = typer.Option(1, "--nproc", help="Ranks on this node, one per GPU."),
    nnodes: str = typer.Option("1", "--nnodes", help="Nodes, or least:most. Run the same command on each."),
    rdzv_endpoint: str = typer.Option(None, "--rdzv-endpoint", help="HOST:PORT where several nodes meet."),
    rdzv_id: str = typer.Option("", "--rdzv-id", help="Tells lives of a run apart, e.g. a job id; same on all nodes."),
    listen: str = typer.Option(None, "--listen", help="This node's address, of several nodes; else by its route."),
    resume: bool = typer.Option(False, "--resume", help="Go on from the newest good checkpoint of the run folder."),
    resume_from: Path = typer.Option(None, "--resume-from", help="Start from this checkpoint or run folder."),
    grace: float = typer.Option(300.0, "--grace", help="Seconds the ranks may take to save and leave when asked to."),
    clear_halt: bool = typer.Option(False, "--clear-halt", help="Put a .HALT of an earlier run aside, and start."),
    allow: list[str] = typer.Option([], "--allow", metavar="RULE", help=ALLOW_HELP),
) -> None:
    """Train on several ranks; restart from the last checkpoint what can get better, stop after 3 cycles without one.

    Ends with the code of `nsa train`: 0 done, 10 asked to leave, 11 halted, 20 config, … Logs of every rank are in
    the run folder, under logs/.

    **Example:** `nsa launch --nproc 8 configs/train_50k.yaml parallel.data=fsdp`
    """
    from nsa.planning.preflight import check_names
    from nsa.train.launch.launcher import LaunchSettings
    from nsa.train.launch.launcher import launch as run

    words = list(arguments or [])
    config = resolve(words)  # a wrong config is told here, before any rank starts
    check_names(allow)

    def program(again: bool) -> list[str]:
        overrides = [f"--allow={rule}" for rule in allow]
        command = [sys.executable, "-m", "nsa.cli", "train", *words, *overrides]
        if again:
            return [*command, "--resume"]
        return [*command, "--resume-from", str(resume_from)] if resume_from is not None else command

    plan = LaunchSettings(
        program=program,
        run_folder=Path(config.train.out_dir),
        nproc=nproc,
        nnodes=nnodes,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_id=rdzv_id,
        listen=listen,
        resume=resume,
        grace_s=grace,
    )
    resuming = resume or resume_from is not None
    _refuse_unfit(config, nproc, plan.nodes(), resuming=resuming, clear_halt=clear_halt, allowed=allow)
    if clear_halt:
        _put_halt_aside(plan.run_folder)
    code = run(plan, lambda text: say(f"launch: {text}"), _show)
    raise typer.Exit(code)


def _refuse_unfit(config: "RunConfig", nproc: int, nodes: tuple[int, int], **given: Any) -> None:
    """Raise with every rule of preflight that this run breaks, before any rank starts.

    In a process of its own: looking at a GPU takes some of its memory, and the launcher stays as long as the run.
    """
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        process.submit(_judge, config, nproc, nodes, given).result()


def _judge(config: "RunConfig", nproc: int, nodes: tuple[int, int], given: dict[str, Any]) -> None:
    from nsa.train.preflight_facts import demand_fitness, world_of

    # Held-out rows take time to read. A node that joins later finds the checkpoints of the run that it joins.
    left_to_ranks = ("held_out", "other_run") if nodes[1] > 1 else ("held_out",)
    demand_fitness(config, world_of(config, nproc, nodes), left_to_ranks=left_to_ranks, **given)


def _put_halt_aside(folder: Path) -> None:
    """Before the first start only: one that comes later, restarts included, is obeyed."""
    from nsa.observe import halt_file
    from nsa.observe.run_folder import RunFolder

    if aside := halt_file.clear(folder, now=time.time(), step=RunFolder(folder).last_step()):
        say(f"launch: the .HALT that was there is {aside} now")


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
