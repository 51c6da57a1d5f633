"""Names of files in a run folder and its checkpoints are spelled in nsa_train/names.py alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from nsa_train import names

ROOT = Path(__file__).parents[1] / "packages"
RECORD_WORDS = ("START", "PROGRESS", "ALIVE", "HALTED", "STOPPED", "DONE", "FAILED", "SKIPPED", "ROLLED_BACK")
ARTIFACTS = {
    value for name, value in vars(names).items() if name.isupper() and type(value) is str and name not in RECORD_WORDS
}
PLAIN_WORDS = {"checkpoints", "evaluations", "latest", "tb", ".lock", names.TENSOR_FILES, names.TENSOR_INDEX}
"""Also ordinary words or endings: only as a part of a path are they the name of an artifact."""
STEMS = ("heartbeat_rank", "stackdump_", "collectives_rank", ".saving-", ".replaced-", ".deleting-")


def spelled(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and isinstance(node.right, ast.Constant):
            yield from {node.right.value} & PLAIN_WORDS
        elif isinstance(node, ast.Constant) and type(node.value) is str:
            yield from {node.value} & (ARTIFACTS - PLAIN_WORDS)
        elif isinstance(node, ast.JoinedStr):
            first = node.values[0] if node.values else None
            if isinstance(first, ast.Constant) and str(first.value).startswith(STEMS):
                yield str(first.value)


def test_no_other_module_spells_the_name_of_an_artifact():
    modules = [path for path in sorted(ROOT.rglob("*.py")) if path != Path(names.__file__)]
    assert len(modules) > 200
    assert [
        f"{path.relative_to(ROOT)}: {word!r}" for path in modules for word in spelled(path.read_text("utf-8"))
    ] == []


@pytest.mark.parametrize(
    "source", ["'env.json'", "run / 'checkpoints'", "f'heartbeat_rank{rank}.jsonl'", "x == '.HALT'"]
)
def test_a_second_spelling_is_seen(source):
    assert list(spelled(source))


def test_a_name_and_its_pattern_agree():
    for rank in (0, 7, 4096):
        assert names.rank_of_heartbeat(names.heartbeat(rank)) == rank
        assert names.is_known_file(names.trainer_state(rank))
    assert names.rank_of_heartbeat("heartbeat_rank01.jsonl") is None
    assert names.step_of(names.step_name(200)) == 200
    for known in (names.COMMIT, names.STATE, f"{names.TENSORS}/{names.TENSOR_INDEX}"):
        assert names.is_known_file(known)
    assert names.is_known_file(f"{names.TENSORS}/__0_0{names.TENSOR_FILES}")
