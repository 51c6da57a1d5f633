"""The `nsa` command: assembles the subcommands and turns our errors into messages and exit codes."""

import sys

import typer

import nsa.cli.data_prepare  # noqa: F401  registers its commands on data_app
from nsa import __version__
from nsa.cli import checkpoint, config, doctor, launch, train
from nsa.cli.data import data_app
from nsa.errors import NSAError

app = typer.Typer(
    name="nsa",
    help="Train and run language models with Native Sparse Attention.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(config.app, name="config")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(data_app, name="data")
app.command()(doctor.doctor)
app.command()(train.train)
app.command()(launch.launch)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"nsa {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print and exit."),
) -> None:
    """Train and run language models with Native Sparse Attention."""


def main() -> None:
    try:
        app()
    except NSAError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
