"""pytest plugin of `python -m proofs.sanitize_cpu`: tests run the instrumented kernels, and fail if they did not."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from nsa.kernels.cpu import build, library
from proofs.sanitize_cpu import sanitizers


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sanitizer", choices=list(sanitizers.SANITIZERS), help="how the CPU kernels are compiled")
    parser.addoption("--sanitizer-short", action="store_true", help="one instruction set, fewer random cases")


def pytest_configure(config: pytest.Config) -> None:
    name, short = config.getoption("--sanitizer"), config.getoption("--sanitizer-short")
    same_cases = settings(max_examples=6 if short else 150, deadline=None, derandomize=True, database=None)
    settings.register_profile("sanitized", same_cases, suppress_health_check=list(HealthCheck))
    settings.load_profile("sanitized")
    sanitizers.use(name, short=short)
    loaded = library.load()
    if not sanitizers.is_instrumented(name, Path(loaded._name)) or Path(loaded._name) != build.library():
        raise pytest.UsageError(f"{loaded._name} was not compiled with the {name} sanitizer")
    if name == "thread":
        # OpenMP's runtime is not instrumented, so its barriers would be invisible. The kernels' own threads are seen.
        loaded.nsa_use_openmp(None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Every test must have used the library that was loaded first: a fixture may have loaded another."""
    name = session.config.getoption("--sanitizer")
    if not sanitizers.is_instrumented(name, Path(library.load()._name)) or library.load.cache_info().misses != 1:
        raise pytest.UsageError(f"a test loaded kernels that were not compiled with the {name} sanitizer")


def pytest_report_header(config: pytest.Config) -> str:
    return f"CPU kernels under the {config.getoption('--sanitizer')} sanitizer, {library.best_isa()} at best"
