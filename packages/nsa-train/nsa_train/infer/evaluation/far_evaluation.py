"""Accuracy of a model on far tasks, by length and depth, with 95 % confidence intervals.

The prompt is computed once, into a cache; all candidate answers follow in one more forward pass. Greedy decoding gives
an answer exactly if every token of it is the most likely one after those before it, so nothing has to be generated.
Scores are those of `nsa.model.loss`, in fp32; Transformers rounds the logits of a bf16 model, and may then generate the
other one of two tokens that are almost equally likely.

N candidates · n tokens of the longest candidate · D model dim · V vocabulary
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.core.probe import probing
from nsa.core.selection_quality import SelectionProbe
from nsa.model.loss import IGNORE, linear_token_scores
from nsa_train.infer.evaluation.far_tasks import FarExample, HayText, make_example
from nsa_train.infer.evaluation.selection import FactHits

_Z = 1.959963984540054  # two-sided 95 %
_Encode = Callable[[str], list[int]]


class CandidateScore(NamedTuple):
    log_likelihood: float
    greedy: bool
    tokens: int


_AnswerScorer = Callable[[Sequence[int], Sequence[Sequence[int]]], list[CandidateScore]]
"""Scores the tokens of candidates after those of a prompt; none of them is empty."""


class _AnswerOutcome(NamedTuple):
    chosen: bool
    """Whether the right answer is the most likely candidate."""
    exact: bool
    """Whether greedy decoding gives the right answer."""
    nats: float
    """Negative log-likelihood of the right answer."""


def _score_example(example: FarExample, scorer: _AnswerScorer, encode: _Encode) -> _AnswerOutcome:
    """Texts are encoded whole, as a model reads them; tokens that all share are the prompt."""
    encoded = [encode(example.prompt + candidate) for candidate in example.candidates]
    prompt = encode(example.prompt)
    shared = min(_common(prompt, tokens) for tokens in encoded)
    scores = scorer(prompt[:shared], [tokens[shared:] for tokens in encoded])
    right = scores[example.candidates.index(example.answer)]
    best = max(range(len(scores)), key=lambda place: scores[place].log_likelihood)
    return _AnswerOutcome(scores[best] is right, right.greedy, -right.log_likelihood)


def _needle_blocks(example: FarExample, encode: _Encode, l_sel: int) -> set[int]:
    """The selection blocks that hold the sentence with the answer."""
    before, after = (
        len(encode(example.prompt[:end])) for end in (example.needle_at, example.needle_at + len(example.needle))
    )
    return set(range(before // l_sel, (max(before, after - 1)) // l_sel + 1))


class TransformersScorer:
    """Scores candidates with a Transformers model; the prompt is computed once, into a cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.selected_by_layer: list[set[int]] = []
        """Blocks that the last token of the last prompt selected, all groups together, for layers that select."""

    @torch.inference_mode()
    def __call__(self, prompt: Sequence[int], candidates: Sequence[Sequence[int]]) -> list[CandidateScore]:
        with probing(self._model, lambda: SelectionProbe(every=len(prompt) + 1)) as probes:
            first = self._model.model(input_ids=self._tensor([prompt]), use_cache=True)
        chosen = [probe.chosen_BQGN for probe in probes.values() if probe.chosen_BQGN is not None]
        self.selected_by_layer = [set(blocks.flatten().tolist()) - {-1} for blocks in chosen]
        cache = first.past_key_values
        cache.batch_repeat_interleave(len(candidates))
        longest = max(map(len, candidates))
        # What follows a candidate changes nothing before it, so padding needs no mask.
        rows = self._tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in candidates])
        later = self._model.model(input_ids=rows, past_key_values=cache, use_cache=True).last_hidden_state
        last_NnD = first.last_hidden_state[:, -1:].expand(len(candidates), 1, -1)
        hidden_NnD = torch.cat([last_NnD, later[:, :-1]], 1)
        return _candidate_scores(hidden_NnD, self._model.lm_head.weight, candidates)

    def _tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows, device=self._model.device)


def _candidate_scores(
    hidden_NnD: Tensor, weight_VD: Tensor, candidates: Sequence[Sequence[int]]
) -> list[CandidateScore]:
    """Scores of candidates from the last hidden states that predict each of their tokens."""
    labels_Nn = torch.full(hidden_NnD.shape[:2], IGNORE)
    for label_n, tokens in zip(labels_Nn, candidates, strict=True):
        label_n[: len(tokens)] = torch.tensor(tokens)
    scores = linear_token_scores(hidden_NnD.flatten(0, 1), weight_VD, labels_Nn.flatten().to(hidden_NnD.device))
    nats_N = scores.losses.cpu().view(labels_Nn.shape).sum(1, dtype=torch.float64).tolist()
    hits_N = scores.hits.view(labels_Nn.shape).sum(1).tolist()
    return [
        CandidateScore(-nats, hits == len(tokens), len(tokens))
        for nats, hits, tokens in zip(nats_N, hits_N, candidates, strict=True)
    ]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


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
    scorer: _AnswerScorer,
    encode: _Encode,
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
                outcomes.append(_score_example(example, scorer, encode))
                needle.add(selected_by_layer(), _needle_blocks(example, encode, l_sel), outcomes[-1].chosen)
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
