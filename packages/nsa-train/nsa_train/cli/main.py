"""Entry point of the `nsa` command: registers the subcommands and maps errors to messages and exit codes."""

import inspect
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
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
from nsa_train.cli.data import data_app
from nsa_train.cli.outputs import PipedStdout, explain, print_error
from nsa_train.cli.startup import prepare_process

# Optional packages, and the extra that installs each; boto3 comes with a package that olmo_core requires.
_EXTRA_OF = {
    **dict.fromkeys(("fsspec", "huggingface_hub", "numpy", "pyarrow", "tokenizers", "urllib3"), "data"),
    **dict.fromkeys(("boto3", "botocore", "olmo_core", "safetensors", "tensorboard"), "train"),
    "zstandard": "data",
    "prometheus_client": "ops",
    "lm_eval": "eval",
    "transformers": "hf",
    **dict.fromkeys(("fastapi", "openai", "uvicorn"), "serve"),
    "triton": "dev",
}
_REQUIRED = ("torch", "pydantic", "yaml")
"""Packages of every install that commands import when they need them: missing after an install with --no-deps."""

app = typer.Typer(
    name="nsa",
    help="Train and run language models with Native Sparse Attention.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(bench.app, name="bench")
app.add_typer(config.app, name="config")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(data_app, name="data")
app.add_typer(convert.export_app, name="export")
app.add_typer(convert.import_app, name="import")
app.command()(first_run.demo)
app.command()(first_run.init)
app.command()(check.doctor)
app.command()(train.train)
app.command()(launch.launch)
app.command()(convert.convert)
app.command()(inference.generate)
app.command()(inference.chat)
app.command()(inference.serve)
app.command()(watch.exporter)
app.command()(watch.alert_rules)
app.command()(watch.watch)
app.command()(watch.status)
app.command()(watch.halt)
app.command()(watch.smoke)
app.command()(preflight.preflight)
app.command()(estimate.estimate)
app.command()(plan.plan)
app.command()(monitor.monitor)
app.command()(report.report)
app.command()(report.compare)
app.command("eval", context_settings=eval.HARNESS_CONTEXT)(eval.evaluate)
app.command()(check.gpu_check)


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
        if package not in _EXTRA_OF and package not in _REQUIRED:
            raise
        print_error(_how_to_install(package))
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


def _how_to_install(package: str) -> str:
    if package in _REQUIRED:
        where, extra = "Every install of nsa-train has it", ""
    else:
        where, extra = f"It is part of the extra {_EXTRA_OF[package]!r}", f"[{_EXTRA_OF[package]}]"
    return (
        f"this command needs the package {package}, which is not installed. {where}. Run: pip install "
        f"'nsa-train{extra}' (in a checkout: pip install -e packages/nsa-attention -e 'packages/nsa-train{extra}')."
    )


if __name__ == "__main__":
    main()
