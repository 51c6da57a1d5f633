"""Fuzzing with Hypothesis: the fixture `fuzz` runs one target, and the end of a run lists cases per target.

A case ends in an answer or in an error of ours with a message. All other exceptions are findings, and so is a case that
takes more than a minute or a gigabyte. Files in `corpus/TARGET` are replayed first, always; .ci/run replays only them.
`-m nightly` adds cases: the same every time, or, with `--fuzz-minutes N`, new ones until the target's share of the time
is used. `tests/conftest.py` loads this file.
"""

import json
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CORPUS = Path(__file__).parent / "corpus"
FIXTURE = "fuzz"
SEEDS, CASES = "seeds", "cases"
PROPERTY = "fuzz_cases"
REPEATABLE_LIMIT_S = 40.0
"""CPU seconds after which no more repeatable cases are drawn; on a usual machine all of them are done long before."""
SLOWEST_CASE_S = 60.0
"""Seconds after which a case is a finding: a small input is read forever, or something is waited for."""
LARGEST_CASE_BYTES = 1 << 30
"""Address space that a case may add before an allocation fails: a MemoryError is a finding as any other exception."""
ROUND_CASES = 1000
"""Cases per search of a target with a share of time: each search of Hypothesis begins with simple cases."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise AssertionError in code that is still busy or blocked after so long; pytest's own timer continues after."""

    def too_long(*_: object) -> None:
        raise AssertionError(f"still busy after {seconds:.0f} s")

    began = time.monotonic()
    handler = signal.signal(signal.SIGALRM, too_long)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 0.001) if left else 0)
        signal.signal(signal.SIGALRM, handler)


@contextmanager
def memory_limit(count: int) -> Iterator[None]:
    """Let allocations fail that would make this process larger than it is by more than `count` bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + count
    allowed = [limit, *(each for each in (soft, hard) if each != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(allowed), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class FuzzCampaign:
    """Runs the cases of one target and counts them."""

    def __init__(self, target: str, *, seeds_only: bool, share_s: float) -> None:
        """share_s: CPU seconds of new cases; 0: the same cases every time."""
        self.target, self._seeds_only, self._share_s = target, seeds_only, share_s
        self.corpus = self.accepted = self.refused = 0
        self._began = time.process_time()

    def run(
        self,
        cases: Any,
        check: Callable[[Any], object],
        *,
        examples: int,
        good: Iterable[Any] = (),
        read_seed: Callable[[bytes], Any] = bytes,
        refusals: type[Exception] | None = None,
    ) -> None:
        """Give the corpus of the target and cases of the strategy `cases` to `check`.

        check: raises an error of ours (`refusals`, default `NSAError`) for a case that it refuses, and AssertionError
        for a wrong answer. examples: number of repeatable cases. good: cases that must not be refused. read_seed: from
        the bytes of a file of the corpus to a case.
        """
        from hypothesis import HealthCheck, Phase, given, settings

        from nsa.errors import NSAError

        began = self._began = time.process_time()
        allowed = refusals or NSAError
        limit = self._share_s or REPEATABLE_LIMIT_S

        def spent() -> float:
            return time.process_time() - began

        def one(case: Any) -> None:
            try:
                with time_limit(SLOWEST_CASE_S), memory_limit(LARGEST_CASE_BYTES):
                    check(case)
                self.accepted += 1
            except allowed as error:
                if not str(error).strip():
                    raise AssertionError(f"{type(error).__name__} without a message") from error
                self.refused += 1

        for case in good:
            check(case)
        for path in self.seeds():
            self.corpus += 1
            try:
                one(read_seed(path.read_bytes()))
            except BaseException as error:
                error.add_note(f"case: {path}")
                raise

        def search(count: int, repeatable: bool) -> None:
            @settings(
                max_examples=count, derandomize=repeatable, database=None, deadline=None,
                suppress_health_check=list(HealthCheck), report_multiple_bugs=False,
                phases=(Phase.generate, Phase.shrink),
            )  # fmt: skip
            @given(cases)
            def target(case: Any) -> None:
                if spent() < limit:
                    one(case)

            target()

        if self._seeds_only:
            return
        if not self._share_s:
            search(examples, True)
        else:
            while spent() < limit:
                search(max(examples, ROUND_CASES), False)

    def seeds(self) -> list[Path]:
        return sorted(path for path in (CORPUS / self.target).glob("*") if path.is_file())

    def counts(self) -> dict[str, Any]:
        return dict(
            target=self.target,
            corpus=self.corpus,
            accepted=self.accepted,
            refused=self.refused,
            cpu_seconds=round(time.process_time() - self._began, 1),
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-minutes",
        type=float,
        default=0.0,
        metavar="N",
        help="CPU minutes of new cases, all targets together (-m nightly tests/fuzz); default: repeatable cases",
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """The selected targets share the minutes."""
    session.config.fuzz_targets = sum(_form(item) == CASES for item in session.items)  # type: ignore[attr-defined]


def _form(item: pytest.Item) -> str | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get(FIXTURE) if callspec is not None else None


@pytest.fixture(
    name=FIXTURE,
    params=[SEEDS, pytest.param(CASES, marks=[pytest.mark.nightly, pytest.mark.timeout(0)])],
)
def fuzz_campaign(request: pytest.FixtureRequest) -> Iterable[FuzzCampaign]:
    target = request.node.originalname.removeprefix("test_")
    targets = max(request.config.fuzz_targets, 1)  # type: ignore[attr-defined]
    share_s = request.config.getoption("--fuzz-minutes") * 60 / targets
    campaign = FuzzCampaign(target, seeds_only=request.param == SEEDS, share_s=share_s)
    yield campaign
    request.node.user_properties.append((PROPERTY, json.dumps(campaign.counts())))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    rows, failed = [], set()
    for outcome, reports in terminalreporter.stats.items():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == PROPERTY and report.when == "teardown":
                    rows.append(json.loads(value))
            if outcome == "failed":
                failed.add(report.nodeid.rpartition("::test_")[2].partition("[")[0])
    if not rows:
        return
    terminalreporter.section("fuzz targets")
    terminalreporter.write_line(
        f"{'target':28} {'corpus':>7} {'cases':>9} {'accepted':>9} {'refused':>9} {'CPU s':>8}  result"
    )
    for row in sorted(rows, key=lambda row: str(row["target"])):
        cases = row["accepted"] + row["refused"]
        result = "FINDING" if row["target"] in failed else "no finding"
        terminalreporter.write_line(
            f"{row['target']:28} {row['corpus']:>7} {cases:>9} {row['accepted']:>9} {row['refused']:>9} "
            f"{row['cpu_seconds']:>8.1f}  {result}"
        )
    cases, seconds = sum(r["accepted"] + r["refused"] for r in rows), sum(r["cpu_seconds"] for r in rows)
    terminalreporter.write_line(f"{len(rows)} targets, {cases} cases, {seconds:.1f} s of CPU time")
