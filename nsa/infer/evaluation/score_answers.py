"""Scores candidate answers to a prompt: log-likelihood of each, and whether greedy decoding would give it.

The prompt is computed once, into a cache; all candidates follow in one more forward pass. Greedy decoding gives an
answer exactly if every token of it is the most likely one after those before it, so nothing has to be generated.

N candidates · n tokens of the longest candidate · V vocabulary
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nsa.core.probe import probing
from nsa.core.selection_quality import SelectionProbe
from nsa.infer.evaluation.far_tasks import FarExample

Encode = Callable[[str], list[int]]


class CandidateScore(NamedTuple):
    log_likelihood: float
    greedy: bool
    tokens: int


class AnswerScorer(Protocol):
    def __call__(self, prompt: Sequence[int], candidates: Sequence[Sequence[int]]) -> list[CandidateScore]:
        """Scores of the candidates' tokens after the prompt's; neither is empty."""
        ...


class AnswerOutcome(NamedTuple):
    chosen: bool
    """Whether the right answer is the most likely candidate."""
    exact: bool
    """Whether greedy decoding gives the right answer."""
    nats: float
    """Negative log-likelihood of the right answer."""


def score_example(example: FarExample, scorer: AnswerScorer, encode: Encode) -> AnswerOutcome:
    """Texts are encoded whole, as a model reads them; tokens that all share are the prompt."""
    encoded = [encode(example.prompt + candidate) for candidate in example.candidates]
    prompt = encode(example.prompt)
    shared = min(_common(prompt, tokens) for tokens in encoded)
    scores = scorer(prompt[:shared], [tokens[shared:] for tokens in encoded])
    right = scores[example.candidates.index(example.answer)]
    best = max(range(len(scores)), key=lambda place: scores[place].log_likelihood)
    return AnswerOutcome(scores[best] is right, right.greedy, -right.log_likelihood)


def needle_blocks(example: FarExample, encode: Encode, l_sel: int) -> set[int]:
    """The selection blocks that hold the sentence with the answer."""
    before, after = (
        len(encode(example.prompt[:end])) for end in (example.needle_at, example.needle_at + len(example.needle))
    )
    return set(range(before // l_sel, (max(before, after - 1)) // l_sel + 1))


class TransformersScorer:
    """Through a Transformers model with a cache."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.chosen_by_layer: list[set[int]] = []
        """Blocks that the last token of the last prompt chose, all groups together, for layers that select."""

    @torch.inference_mode()
    def __call__(self, prompt: Sequence[int], candidates: Sequence[Sequence[int]]) -> list[CandidateScore]:
        with probing(self._model, lambda: SelectionProbe(every=len(prompt) + 1)) as probes:
            first = self._model(input_ids=self._tensor([prompt]), use_cache=True, logits_to_keep=1)
        chosen = [probe.chosen_BQGN for probe in probes.values() if probe.chosen_BQGN is not None]
        self.chosen_by_layer = [set(blocks.flatten().tolist()) - {-1} for blocks in chosen]
        cache = first.past_key_values
        cache.batch_repeat_interleave(len(candidates))
        longest = max(map(len, candidates))
        # What follows a candidate changes nothing before it, so padding needs no mask.
        rows = self._tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in candidates])
        later = self._model(input_ids=rows, past_key_values=cache, use_cache=True).logits
        logits_NnV = torch.cat([first.logits.expand(len(candidates), 1, -1), later[:, :-1]], 1)
        return candidate_scores(logits_NnV, candidates)

    def _tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(rows, device=self._model.device)


def candidate_scores(logits_NnV: Tensor, candidates: Sequence[Sequence[int]]) -> list[CandidateScore]:
    """From the logits that predict each token of each candidate."""
    found = []
    for logits_nV, tokens in zip(logits_NnV.double(), candidates, strict=True):
        logits_nV, token_n1 = logits_nV[: len(tokens)], torch.tensor(tokens, device=logits_nV.device)[:, None]
        log_likelihood = logits_nV.log_softmax(-1).gather(1, token_n1).sum()
        greedy = (logits_nV.argmax(-1, keepdim=True) == token_n1).all()
        found.append(CandidateScore(float(log_likelihood), bool(greedy), len(tokens)))
    return found


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
