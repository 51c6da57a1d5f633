"""`nsa config`: print a resolved config, check config files."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand

from nsa.errors import ConfigError
from nsa_train.cli.outputs import print_json, print_line, table_console
from nsa_train.terminal_text import printable

if TYPE_CHECKING:
    from nsa_train.config import RunConfig

app = typer.Typer(help="Print and check the settings of a run.", no_args_is_help=True)

_ARGUMENTS_HELP = "Config file or name of a shipped one (default: $CONFIG), then settings, e.g. train.lr=1e-4."


class SettingsCommand(TyperCommand):
    """A command with arguments CONFIG KEY=VALUE: a setting written as an option is answered with the word to type."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for place, word in enumerate(args):
            name, has_value, value = word.partition("=")
            if name.startswith("--") and name not in (*options, *self.get_help_option_names(ctx), "--"):
                following = args[place + 1] if place + 1 < len(args) else ""
                value = value if has_value else following
                if words := _as_settings(name, value if value and not value.startswith("--") else "VALUE"):
                    ctx.fail(f"No such option: {name}. A setting has no dashes: {' or '.join(words)}")
        return super().parse_args(ctx, args)


def _as_settings(option: str, value: str) -> list[str]:
    """The settings, as KEY=VALUE, that an option of this name may mean."""
    from nsa_train.config.schema import settings

    name = option.removeprefix("--").replace("-", "_")
    return [f"{key}={value}" for key in settings() if f".{key}".endswith(f".{name}")]


@app.command(cls=SettingsCommand)
def show(
    arguments: list[str] = typer.Argument(None, metavar="FILE KEY=VALUE", help=_ARGUMENTS_HELP),
    as_json: bool = typer.Option(False, "--json", help="Print JSON: config, origins, notices."),
    changed: bool = typer.Option(False, "--changed", help="Print only settings that differ from their default."),
) -> None:
    """Print every setting of a run and the origin of its value.

    Later layers override earlier ones: default, hardware profile, file, environment, command line.

    **Example:** `nsa config show train_50k train.lr=1e-4 --changed`
    """
    from nsa_train.config.schema import settings

    config = resolve(arguments or [])
    # A value derived from others (auto, resolved) was not changed by the user.
    differ = [key for key, field in settings().items() if config.value(key) != field.default]
    keys = [key for key in differ if config.origin(key) != "default"] if changed else list(settings())
    if as_json:
        origins = {key: config.origin(key) for key in keys}
        values = config.model_dump(mode="json", exclude_defaults=changed, exclude_unset=changed)
        print_json({"config": values, "origins": origins, "notices": config.notices})
    else:
        _print_table(config, keys)


@app.command()
def check(
    files: list[Path] = typer.Argument(..., metavar="FILE", help="Config files to check."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON: for each file, valid, problem and notices."),
) -> None:
    """Check config files, with the NSA_* environment variables applied.

    Exit code: 0 if all are valid, 20 if not.

    Every problem of every file is listed with its line number.

    **Example:** `nsa config check my-run/config.yaml`
    """
    from nsa_train.config import env, load

    environ = env.snapshot()
    verdicts: list[dict[str, Any]] = []
    for file in files:
        try:
            notices = load(file, environ=environ).notices
        except ConfigError as error:
            verdicts.append({"file": str(file), "valid": False, "problem": str(error), "notices": []})
        else:
            verdicts.append({"file": str(file), "valid": True, "problem": None, "notices": notices})
    if as_json:
        print_json(verdicts)
    for verdict in () if as_json else verdicts:
        if not verdict["valid"]:
            print(printable(verdict["problem"], keep_newlines=True))
            continue
        print_line(f"{verdict['file']} is valid")
        for notice in verdict["notices"]:
            print_line(f"  - notice: {notice}")
    if not all(verdict["valid"] for verdict in verdicts):
        raise typer.Exit(ConfigError.exit_code)


def resolve(arguments: list[str]) -> "RunConfig":
    """Load the config named on the command line (at most one file) with key=value overrides and the environment."""
    from nsa_train.config import env, load

    overrides = [word for word in arguments if "=" in word and not Path(word).exists()]
    files = [word for word in arguments if word not in overrides]
    if len(files) > 1:
        raise ConfigError(
            f"expected one config file, got {len(files)} ({', '.join(files)}). Write settings to override as key=value."
        )
    return load(files[0] if files else None, environ=env.snapshot(), overrides=overrides)


def _print_table(config: "RunConfig", keys: list[str]) -> None:
    from rich.table import Table

    from nsa_train.config.setting_types import plain

    console = table_console()
    for notice in config.notices:
        console.print(f"notice: {printable(notice)}", style="yellow", soft_wrap=True)
    table = Table("setting", "value", "from", box=None, pad_edge=False)
    section = ""
    for key in keys:
        if key.partition(".")[0] != section and table.row_count:
            table.add_row()
        section = key.partition(".")[0]
        origin = config.origin(key)
        table.add_row(
            key, printable(plain(config.value(key))), printable(origin), style="dim" if origin == "default" else None
        )
    console.print(table)
