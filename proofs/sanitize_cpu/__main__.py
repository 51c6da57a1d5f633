"""Run the tests of the CPU kernels with a sanitizer: `python -m proofs.sanitize_cpu address|undefined|thread`.

    python -m proofs.sanitize_cpu address                all instruction sets of this machine, all kernel tests
    python -m proofs.sanitize_cpu thread --short         one instruction set, random arguments and threads only
    python -m proofs.sanitize_cpu undefined -k mix       other arguments are pytest's

A build takes 10 to 90 s and is kept in the user's cache folder. exit code: 0 if every test passed and nothing was
reported; 1 otherwise, with the reports; 2 for wrong arguments.
"""

import argparse
import sys
from pathlib import Path

from nsa.errors import ConfigError
from nsa.kernels.cpu import build
from proofs.sanitize_cpu import sanitizers

ROOT = Path(__file__).parents[2]
SHORT = ("tests/nsa/kernels/sanitized_arguments.py",)
WHOLE = (
    *SHORT,
    "tests/nsa/kernels/test_cpu.py",
    "tests/nsa/kernels/test_cpu_decoder.py",
    "tests/nsa/kernels/test_mix.py",
    "tests/nsa/core/test_kv_cache.py",
    "tests/nsa/core/test_paged_cache.py",
    "tests/nsa/core/test_merged_attention.py",
)
# It starts a process of its own, in which the kernels are the usual ones.
DESELECTED = "tests/nsa/kernels/test_cpu.py::test_kernels_start_no_threads_beside_torchs_own"


def pytest_command(name: str, short: bool, words: list[str]) -> list[str]:
    plugin = ["-p", "proofs.sanitize_cpu.pytest_plugin", "--sanitizer", name, *(["--sanitizer-short"] if short else [])]
    quiet = ["-p", "no:cacheprovider", "-p", "no:faulthandler", "-o", "timeout=0", "-q", "--deselect", DESELECTED]
    return [sys.executable, "-m", "pytest", *plugin, *quiet, *(SHORT if short else WHOLE), *words]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sanitizer", choices=list(sanitizers.SANITIZERS))
    parser.add_argument("--short", action="store_true", help="one instruction set, random arguments and threads only")
    options, words = parser.parse_known_args()
    try:
        sanitizers.use(options.sanitizer, short=options.short)
        build.library()  # here, so that the compiler runs without the sanitizer's runtime
        ended = sanitizers.run(options.sanitizer, pytest_command(options.sanitizer, options.short, words))
    except (build.BuildError, ConfigError) as error:
        parser.error(str(error))
    for report in ended.reports:
        print(report)
    print(f"{options.sanitizer}: {len(ended.reports)} reports, pytest exited with {ended.code}")
    return 0 if ended.clean else 1


if __name__ == "__main__":
    sys.exit(main())
