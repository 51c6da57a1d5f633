"""Several runs side by side: which settings differ, and the figures people compare."""

from collections.abc import Sequence
from string import ascii_uppercase

from nsa.config.layer import flatten
from nsa.observe.view.formatting import count, duration, number, plain, share
from nsa.observe.view.run_data import RunData
from nsa.observe.view.summary import RunSummary

LETTERS = ascii_uppercase
_OF_THE_PLACE = ("train.out_dir",)
"""Differs always, and explains nothing."""


def labels(runs: Sequence[RunData]) -> list[str]:
    """A letter and the folder's name for each; the folder above as well where names repeat."""
    names = [run.name for run in runs]
    resolved = [run.folder.resolve() for run in runs]
    shown = [
        f"{path.parent.name}/{name}" if names.count(name) > 1 else name
        for name, path in zip(names, resolved, strict=True)
    ]
    return [f"{letter} {plain(name, 60)}" for letter, name in zip(LETTERS, shown, strict=False)]


def differing_settings(runs: Sequence[RunData]) -> list[tuple[str, list[object]]]:
    """Settings that are not the same in all runs; None stands for a setting that a run does not have."""
    all_settings = [flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for settings in all_settings for key in settings)
    found = []
    for key in keys:
        values = [settings.get(key) for settings in all_settings]
        if key not in _OF_THE_PLACE and any(value != values[0] for value in values[1:]):
            found.append((key, values))
    return found


def figures(summaries: Sequence[RunSummary]) -> list[tuple[str, list[str]]]:
    """What to compare by → one figure per run."""

    def at(value: float, step: int) -> str:
        return f"{number(value)} at {step:,}" if value == value else number(value)

    return [
        ("steps", [f"{each.step:,}" for each in summaries]),
        ("loss, mean of the last records", [_last_loss(each) for each in summaries]),
        ("least loss of a record", [at(each.best_loss, each.best_step) for each in summaries]),
        ("held-out loss, last", [at(each.held_out, each.held_out_step) for each in summaries]),
        ("held-out loss, best", [at(each.best_held_out, each.best_held_out_step) for each in summaries]),
        ("tokens", [count(each.tokens) for each in summaries]),
        ("tokens per second, median", [count(each.toks_per_s) for each in summaries]),
        ("goodput", [share(each.goodput) for each in summaries]),
        ("wall time", [duration(each.wall.total) if each.wall else number(None) for each in summaries]),
        ("restarts", [str(each.restarts) for each in summaries]),
        ("steps done again", [f"{each.lost_steps:,}" for each in summaries]),
        ("steps skipped", [str(each.skipped) for each in summaries]),
        ("unreadable records", [str(each.unreadable) for each in summaries]),
    ]


def _last_loss(of: RunSummary) -> str:
    return f"{number(of.loss)} ({of.loss_records} up to {of.loss_step:,})" if of.loss_records else number(None)
