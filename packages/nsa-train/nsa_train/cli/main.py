"""Entry point of the `nsa` command: registers the subcommands and maps errors to messages and exit codes."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from functools import partial
from typing import Annotated, TextIO, cast, get_args, get_origin

import typer
from typer.models import ParameterInfo

from nsa import __version__
from nsa.errors import ConfigError, NSAError
from nsa_train.cli import (
    bench,
    check,
    checkpoint,
    config,
    convert,
    estimate,
    eval,
    first_run,
    inference,
    launch,
    monitor,
    plan,
    preflight,
    report,
    train,
    watch,
)
from nsa_train.cli.config import SettingsCommand
from nsa_train.cli.data import data_app
from nsa_train.cli.early_checks import how_to_install, is_known_package
from nsa_train.cli.outputs import PipedStdout, explain, print_error
from nsa_train.cli.startup import prepare_process

app = typer.Typer(
    name="nsa",
    help="Train and run language models with Native Sparse Attention.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
_START, _TRAIN, _WATCH, _USE, _SHARE, _CHECK = "Start", "Train", "Watch", "Use a model", "Share a model", "Check"
"""Panels of `nsa --help`, by what a person does."""

_with_settings = partial(app.command, cls=SettingsCommand)
app.command(rich_help_panel=_START)(first_run.init)
app.command(rich_help_panel=_START)(first_run.demo)
app.command(rich_help_panel=_START)(check.doctor)
app.add_typer(data_app, name="data", rich_help_panel=_TRAIN)
app.add_typer(config.app, name="config", rich_help_panel=_TRAIN)
_with_settings(rich_help_panel=_TRAIN)(train.train)
_with_settings(rich_help_panel=_TRAIN)(launch.launch)
_with_settings(rich_help_panel=_TRAIN)(estimate.estimate)
_with_settings(rich_help_panel=_TRAIN)(plan.plan)
app.command(rich_help_panel=_WATCH)(monitor.monitor)
app.command(rich_help_panel=_WATCH)(watch.status)
app.command(rich_help_panel=_WATCH)(report.report)
app.command(rich_help_panel=_WATCH)(report.compare)
app.command(rich_help_panel=_WATCH)(watch.halt)
app.command(rich_help_panel=_WATCH)(watch.watch)
app.command(rich_help_panel=_WATCH)(watch.exporter)
app.command(rich_help_panel=_WATCH)(watch.alert_rules)
app.command(rich_help_panel=_USE)(inference.generate)
app.command(rich_help_panel=_USE)(inference.chat)
app.command(rich_help_panel=_USE)(inference.serve)
app.command("eval", context_settings=eval.HARNESS_CONTEXT, rich_help_panel=_USE)(eval.evaluate)
app.add_typer(checkpoint.app, name="checkpoint", rich_help_panel=_SHARE)
app.add_typer(convert.export_app, name="export", rich_help_panel=_SHARE)
app.add_typer(convert.import_app, name="import", rich_help_panel=_SHARE)
app.command(rich_help_panel=_SHARE)(convert.convert)
_with_settings(rich_help_panel=_CHECK)(preflight.preflight)
app.command(rich_help_panel=_CHECK)(watch.smoke)
app.command(rich_help_panel=_CHECK)(check.gpu_check)
app.add_typer(bench.app, name="bench", rich_help_panel=_CHECK)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"nsa {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Train and run language models with Native Sparse Attention."""


def _number_options(commands: typer.Typer) -> Iterator[ParameterInfo]:
    """Options of type int or float, declared as `n: int = Option(…)` or as `n: Annotated[int, Option(…)]`."""
    for group in commands.registered_groups:
        if group.typer_instance is not None:
            yield from _number_options(group.typer_instance)
    for command in commands.registered_commands:
        for parameter in inspect.signature(command.callback).parameters.values() if command.callback else ():
            annotated = get_origin(parameter.annotation) is Annotated
            kind, *more = get_args(parameter.annotation) if annotated else (parameter.annotation, parameter.default)
            if {int, float} & {kind, *get_args(kind)}:  # `int | None` too
                yield from (each for each in more if isinstance(each, ParameterInfo))


def _require_finite(number: float | None) -> float | None:
    if number is not None and not -(2**63) <= number < 2**63:
        raise typer.BadParameter(f"{number} is not a finite number of at most 64 bits.")
    return number


def require_finite_numbers(commands: typer.Typer) -> None:
    """Refuse numbers that are not finite, or of more than 64 bits, in every option of these commands."""
    for each in _number_options(commands):
        each.callback = each.callback or _require_finite


require_finite_numbers(app)


def main() -> None:
    run_app(app, "nsa")  # also for python -m nsa_train.cli: shell completion is made for this name


def run_app(commands: typer.Typer, name: str) -> None:
    """Run the command line; errors become a message and an exit code."""
    prepare_process()
    with redirect_stdout(cast(TextIO, PipedStdout(sys.stdout))):
        _run(commands, name)


def _run(commands: typer.Typer, name: str) -> None:
    try:
        _require_text(sys.argv[1:])
        try:
            commands(prog_name=name)
        finally:
            sys.stdout.flush()
    except NSAError as error:
        print_error(f"{type(error).__name__}: {error}")
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not is_known_package(package):
            raise
        print_error(how_to_install([package]))
        sys.exit(ConfigError.exit_code)
    except OSError as error:
        if (explained := explain(error)) is None:
            raise
        print_error(f"{type(explained).__name__}: {explained}")
        sys.exit(explained.exit_code)


def _require_text(words: list[str]) -> None:
    """Python keeps bytes of the command line that are not UTF-8 as surrogates, which no file or socket takes."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"{word!r} is not UTF-8: names, paths and texts are stored in UTF-8 files (config, records, JSON). "
                "Write it in UTF-8; a folder with another name can be renamed or entered with cd."
            ) from error


if __name__ == "__main__":
    main()
