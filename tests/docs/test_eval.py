"""docs/EVAL.md: its table of far tasks is that of the code. Its commands run in test_user_pages.py."""

import re
from pathlib import Path

from nsa_train.infer.evaluation.far_tasks import _CANDIDATES, _CHAINS, _HOPS, _PAIRS, FAR_TASKS

PAGE = Path(__file__).parents[2] / "docs" / "EVAL.md"
TEXT = PAGE.read_text(encoding="utf-8")


def test_the_table_of_tasks_is_that_of_the_code():
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d+):", TEXT, re.MULTILINE)
    assert {task: int(n) for task, n in rows} == dict(
        zip(FAR_TASKS, (_CANDIDATES, _CANDIDATES, _CHAINS, _PAIRS), strict=True)
    )
    assert (_CHAINS, _HOPS, _PAIRS) == (4, 3, 16)
