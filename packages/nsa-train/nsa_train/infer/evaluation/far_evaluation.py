"""Accuracy of a model on far tasks, by length and depth, with 95 % confidence intervals."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nsa_train.infer.evaluation.fact_hits import FactHits
from nsa_train.infer.evaluation.far_tasks import make_example
from nsa_train.infer.evaluation.hay import HayText
from nsa_train.infer.evaluation.score_answers import AnswerScorer, Encode, needle_blocks, score_example

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
    needle: FactHits = field(default_factory=FactHits)
    """Hits of the prompt's last token on blocks of the needle; an answer is right if it is the most likely one."""

    def as_record(self) -> dict[str, Any]:
        any_layer = self.needle.any_layer
        selection = {
            "needle_hit_by_layer": [counts.hit_rate for counts in self.needle.by_layer],
            "needle_hit": any_layer.hit_rate,
            "accuracy_if_hit": any_layer.accuracy_if_hit,
            "accuracy_if_missed": any_layer.accuracy_if_missed,
        }
        return (
            {name: value for name, value in asdict(self).items() if name != "needle"}
            | (selection if self.needle.by_layer else {})
            | {
                "chance": 1 / self.candidates,
                "accuracy": self.chosen / self.examples,
                "accuracy_interval": list(_wilson_interval(self.chosen, self.examples)),
                "exact_match": self.exact / self.examples,
                "exact_match_interval": list(_wilson_interval(self.exact, self.examples)),
            }
        )


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
    l_sel: int = 1,
    selected_by_layer: Callable[[], Sequence[set[int]]] = lambda: (),
    after_example: Callable[[], None] = lambda: None,
) -> list[FarCell]:
    """`limit` examples for every length and depth.

    selected_by_layer: called after each example, the blocks of l_sel tokens that the prompt's last token selected.
    """
    cells = []
    for length in lengths:
        for depth in depths:
            outcomes, needle, candidates = [], FactHits(), 1
            for number in range(limit):
                example = make_example(
                    task, hay, lambda text: len(encode(text)), length=length, depth=depth, number=number, seed=seed
                )
                outcomes.append(score_example(example, scorer, encode))
                needle.add(selected_by_layer(), needle_blocks(example, encode, l_sel), outcomes[-1].chosen)
                candidates = len(example.candidates)
                after_example()
            chosen, exact = sum(each.chosen for each in outcomes), sum(each.exact for each in outcomes)
            nats = math.fsum(each.nats for each in outcomes) / limit
            cells.append(FarCell(length, depth, limit, candidates, chosen, exact, nats, needle))
    return cells


def _wilson_interval(hits: int, trials: int) -> tuple[float, float]:
    """95 % confidence interval of a share; also good near 0 and 1, and for few trials."""
    share, z2 = hits / trials, _Z**2
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    return max(0.0, middle - half), min(1.0, middle + half)
