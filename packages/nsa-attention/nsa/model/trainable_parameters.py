"""Which parameters a run trains: `train.trainable`, glob patterns of parameter names as in a checkpoint."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from nsa.errors import ConfigError

ALL_PARAMETERS = ("*",)
_EXAMPLES = 3


def trainable_names(names: Iterable[str], patterns: Sequence[str]) -> frozenset[str]:
    """The names that match a pattern; raises ConfigError if one of the patterns matches none."""
    names = list(names)
    matches = {pattern: [name for name in names if fnmatchcase(name, pattern)] for pattern in patterns}
    if unmatched := [pattern for pattern, names_of_pattern in matches.items() if not names_of_pattern]:
        examples = ", ".join([*names[:_EXAMPLES], "…", *names[-_EXAMPLES:]])
        raise ConfigError(
            f"train.trainable ({', '.join(patterns)}) must name parameters of the model: {', '.join(unmatched)} "
            f"matches none of its {len(names)} ({examples}). Correct the pattern, or leave it out."
        )
    return frozenset(name for names_of_pattern in matches.values() for name in names_of_pattern)


def freeze_others(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze every parameter that no pattern matches. Before blocks are wrapped, which changes names."""
    trained = trainable_names((name for name, _ in model.named_parameters()), patterns)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
