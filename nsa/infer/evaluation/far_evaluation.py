"""Accuracy of a model on far tasks, by length and depth, with 95 % confidence intervals."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nsa.infer.evaluation.far_tasks import make_example
from nsa.infer.evaluation.hay import HayText
from nsa.infer.evaluation.score_answers import AnswerScorer, Encode, score_example

_Z = 1.959963984540054  # two-sided 95 %


@dataclass(frozen=True)
class FarCell:
    """Outcomes of the examples of one task at one length and depth."""

    length: int
    depth: float
    examples: int
    candidates: int
    chosen: int
    """Examples whose right answer is the most likely candidate."""
    exact: int
    """Examples whose right answer is what greedy decoding gives."""
    answer_nats: float
    """Negative log-likelihood of the right answer, mean."""

    def as_record(self) -> dict[str, Any]:
        return asdict(self) | {
            "chance": 1 / self.candidates,
            "accuracy": self.chosen / self.examples,
            "accuracy_interval": list(wilson_interval(self.chosen, self.examples)),
            "exact_match": self.exact / self.examples,
            "exact_match_interval": list(wilson_interval(self.exact, self.examples)),
        }


def evaluate_far_task(
    task: str,
    scorer: AnswerScorer,
    encode: Encode,
    hay: HayText,
    *,
    lengths: Sequence[int],
    depths: Sequence[float],
    limit: int,
    seed: int = 0,
    after_example: Callable[[], None] = lambda: None,
) -> list[FarCell]:
    """`limit` examples for every length and depth."""
    cells = []
    for length in lengths:
        for depth in depths:
            outcomes, candidates = [], 1
            for number in range(limit):
                example = make_example(
                    task, hay, lambda text: len(encode(text)), length=length, depth=depth, number=number, seed=seed
                )
                outcomes.append(score_example(example, scorer, encode))
                candidates = len(example.candidates)
                after_example()
            chosen, exact = sum(each.chosen for each in outcomes), sum(each.exact for each in outcomes)
            nats = math.fsum(each.nats for each in outcomes) / limit
            cells.append(FarCell(length, depth, limit, candidates, chosen, exact, nats))
    return cells


def wilson_interval(hits: int, trials: int) -> tuple[float, float]:
    """95 % confidence interval of a share; also good near 0 and 1, and for few trials."""
    share, z2 = hits / trials, _Z**2
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    return max(0.0, middle - half), min(1.0, middle + half)
