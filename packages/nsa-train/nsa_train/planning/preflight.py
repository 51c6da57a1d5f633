"""Preflight: evaluates every rule on the facts of a run and raises with all that fail."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nsa.errors import ConfigError, PreflightError
from nsa_train.config.layer import nearest
from nsa_train.planning.preflight_facts import PreflightFacts, RuleFinding
from nsa_train.planning.preflight_rules import NAMES, NEVER_ALLOWED, RULES, is_long


class RuleStatus(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    ALLOWED = "allowed"
    """The rule fails and was allowed by name (`--allow`)."""
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class RuleVerdict:
    rule: str
    asks: str
    status: RuleStatus
    message: str
    fix: str = ""


def judge(facts: PreflightFacts, allowed: Sequence[str] = ()) -> list[RuleVerdict]:
    """Evaluate every rule that applies to this run."""
    check_names(allowed)
    long = is_long(facts)
    rules = [rule for rule in RULES if (long or not rule.long_runs_only) and rule.applies(facts)]
    return [_verdict(rule.name, rule.asks, rule.check(facts), allowed) for rule in rules]


def failed(verdicts: Iterable[RuleVerdict]) -> list[RuleVerdict]:
    return [verdict for verdict in verdicts if verdict.status == RuleStatus.FAIL]


def require_passed(verdicts: Iterable[RuleVerdict]) -> None:
    """Raise with every rule that failed."""
    if not (failures := failed(verdicts)):
        return
    count = "1 rule" if len(failures) == 1 else f"{len(failures)} rules"
    lines = [f"  - {verdict.rule}: {verdict.message.rstrip('.')}. {verdict.fix}".rstrip() for verdict in failures]
    raise PreflightError("\n".join([f"preflight refuses this run, {count}:", *lines, how_to_override(failures)]))


def how_to_override(failed: Iterable[RuleVerdict]) -> str:
    """The `--allow` options that would start the run anyway, or the rules that cannot be allowed."""
    rules = [verdict.rule for verdict in failed]
    if never := [rule for rule in rules if rule in NEVER_ALLOWED]:
        return f"--allow does not apply to {', '.join(never)}: the run could not start."
    return "To run it anyway: " + " ".join(f"--allow={rule}" for rule in rules)


def check_names(allowed: Sequence[str]) -> None:
    """Refuse an `--allow` that names no rule, which would otherwise be ignored silently."""
    for name in allowed:
        if name not in NAMES:
            guess = nearest(name, NAMES)
            hint = f"Did you mean {guess}?" if guess else f"Rules are {', '.join(NAMES)}."
            raise ConfigError(f"--allow {name}: no such preflight rule. {hint}")
        if name in NEVER_ALLOWED:
            raise ConfigError(f"--allow {name}: the run could not start. Correct what this rule reports.")


def _verdict(name: str, asks: str, finding: RuleFinding, allowed: Sequence[str]) -> RuleVerdict:
    if finding.holds is None:
        return RuleVerdict(name, asks, RuleStatus.NOT_CHECKED, finding.what)
    if finding.holds:
        return RuleVerdict(name, asks, RuleStatus.PASS, finding.what)
    status = RuleStatus.ALLOWED if name in allowed else RuleStatus.FAIL
    return RuleVerdict(name, asks, status, finding.what, finding.fix)
