"""How far a step's gradients depend on its division: `python -m tools.step_gradients`, a minute or two.

One step with cross-entropy and selector loss is divided among passes (accumulation 1, 2, 4) and ranks (one, or two with
ddp or fsdp), with every packing and both forms of the selector loss. Printed for each: the largest difference of a
gradient from that of one pass on one rank, relative to the largest number of its parameter, and that parameter. The
exit code is 1 if one is above the limit of the tests, 1e-5.
"""

import sys
import tempfile
from pathlib import Path

from tests.nsa_train.train.divided_steps import differences
from tests.nsa_train.train.test_divided_steps import LIMIT, all_cases


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        measured = differences(all_cases(Path(folder)))
    print("| rows, division | parameters | largest difference | of |\n|---|---|---|---|")
    largest = 0.0
    for name, by_parameter in measured.items():
        worst = max(by_parameter, key=lambda parameter: by_parameter[parameter])
        largest = max(largest, by_parameter[worst])
        print(f"| {name} | {len(by_parameter)} | {by_parameter[worst]:.1e} | `{worst}` |")
    print(f"\n{len(measured)} cases, largest difference {largest:.1e}, limit {LIMIT:g}")
    return int(largest > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
