"""`nsa preflight`: checks a run against every preflight rule before it starts."""

from typing import TYPE_CHECKING, Any

import typer

from nsa.errors import PreflightError
from nsa_train.cli.config import resolve
from nsa_train.cli.early_checks import DATA_PACKAGES, require_packages
from nsa_train.cli.estimate import ARGUMENTS_HELP, EFFICIENCY_HELP, PRICE_HELP, TARGET_HELP, as_dict, summary
from nsa_train.cli.outputs import ProgressLine, print_json, table_console
from nsa_train.terminal_text import printable

if TYPE_CHECKING:
    from nsa_train.planning.preflight_facts import PreflightFacts
    from nsa_train.planning.preflight_rules import RuleVerdict

ALLOW_HELP = "Run although this rule fails; repeatable. Recorded in env.json and in every heartbeat."
_STYLES = {"pass": "green", "fail": "bold red", "allowed": "yellow", "not checked": "cyan"}


def preflight(
    arguments: list[str] = typer.Argument(None, metavar="CONFIG KEY=VALUE", help=ARGUMENTS_HELP),
    target: str = typer.Option("here", help=TARGET_HELP),
    allow: list[str] = typer.Option([], "--allow", metavar="RULE", help=ALLOW_HELP),
    efficiency: float = typer.Option(None, min=1e-6, max=1.0, help=EFFICIENCY_HELP),
    price: float = typer.Option(None, min=0.0, help=PRICE_HELP),
    fetch: bool = typer.Option(False, "--fetch", help="Also fetch one batch of remote data."),
    dry_run: bool = typer.Option(True, help="Run one batch, one step and one checkpoint."),
    timeout: float = typer.Option(600.0, min=1.0, help="Time limit of the dry run, in seconds."),
    resume: bool = typer.Option(False, "--resume", help="Check a run that resumes from its run folder."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON: verdicts and estimate."),
) -> None:
    """Report every problem of a run before it starts; exit 2 if any rule fails. `nsa train` checks the same rules.

    The dry run reads a real batch, runs a step and writes a checkpoint on this machine; for another `--target` it runs
    the step with fake tensors. Rules that could not be checked are listed with the reason. The dry run is a separate
    process with memory and time limits; parts that do not fit on this machine are skipped. A run folder that holds a
    run or a `.HALT` file is reported and not refused: `nsa train` asks for --resume or --clear-halt there.

    **Examples:** `nsa preflight train_50k --target a100-80gb`, and on the training machine
    `nsa preflight train_50k --fetch`
    """
    config = resolve(arguments or [])
    require_packages(*DATA_PACKAGES)

    from nsa_train.planning.hardware import parse_target
    from nsa_train.planning.preflight_rules import DECIDED_AT_START, RuleStatus, check_names, check_rules
    from nsa_train.train.gather_preflight_facts import gather

    check_names(allow)
    with ProgressLine("checking") as line:
        facts = gather(
            config,
            parse_target(target, config.runtime.device),
            efficiency=efficiency,
            price=price,
            try_it=dry_run,
            look_for_store=True,
            fetch_remote=fetch,
            resuming=resume,
            time_limit_s=timeout,
            log=lambda text: line.update(f"dry run: {text}"),
        )
    verdicts = check_rules(facts, (*allow, *DECIDED_AT_START))
    if as_json:
        print_json(_as_dict(facts, verdicts))
    else:
        _print(facts, verdicts)
    if any(verdict.status == RuleStatus.FAIL for verdict in verdicts):
        raise typer.Exit(PreflightError.exit_code)


def _as_dict(facts: "PreflightFacts", verdicts: list["RuleVerdict"]) -> dict[str, Any]:
    from nsa_train.planning.preflight_rules import is_long

    return {
        "target": str(facts.target),
        "long_run": is_long(facts),
        "refused": any(verdict.status == "fail" for verdict in verdicts),
        "verdicts": [vars(verdict) for verdict in verdicts],
        "estimate": as_dict(facts.estimate) if facts.estimate is not None else None,
    }


def _print(facts: "PreflightFacts", verdicts: list["RuleVerdict"]) -> None:
    from rich.table import Table
    from rich.text import Text

    from nsa_train.planning.preflight_rules import LONG_RUN_STEPS, failed, how_to_override, is_long

    console = table_console(120)
    steps, long = facts.config.train.steps, is_long(facts)
    console.print(f"{steps:,} steps on {facts.target}: a {'long' if long else 'short'} run", style="bold")
    if not long:
        console.print(f"Rules for long runs ({LONG_RUN_STEPS:,} steps, or hours on a GPU) do not apply.", style="dim")
    console.print()
    table = Table("", "rule", "found", box=None, pad_edge=False)
    for verdict in verdicts:
        text = Text(printable(verdict.message, keep_newlines=True))
        if verdict.fix:
            text.append(f"\n{printable(verdict.fix, keep_newlines=True)}", style="bold")
        table.add_row(Text(verdict.status, style=_STYLES[verdict.status]), verdict.rule, text)
    console.print(table)
    console.print()
    if facts.estimate is not None:
        figures = Table(box=None, show_header=False, pad_edge=False)
        for name, line in summary(facts.estimate):
            figures.add_row(name, line)
        console.print(figures)
        console.print()
    if broken := failed(verdicts):
        rules = "1 rule fails" if len(broken) == 1 else f"{len(broken)} rules fail"
        console.print(f"Refused: {rules}.", style="bold red")
        for line in how_to_override(broken):
            console.print(line)
    else:
        unchecked = sum(verdict.status == "not checked" for verdict in verdicts)
        rest = f", {unchecked} rules could not be checked" if unchecked else ""
        console.print(f"No rule fails{rest}.", style="bold green")
