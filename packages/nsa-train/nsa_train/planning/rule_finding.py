"""What a preflight rule found."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RuleFinding:
    """`holds` is None if the rule could not be checked; `what` then gives the reason."""

    holds: bool | None
    what: str
    fix: str = ""


def finding(holds: bool, what: str, why: str, fix: str) -> RuleFinding:
    """`why` is the reason of the rule, shown only if it fails."""
    return RuleFinding(holds, what if holds else f"{what}: {why}", fix)
