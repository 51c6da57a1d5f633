"""Scores candidate answers to a prompt: log-likelihood of each, and whether greedy decoding would give it.

The prompt is computed once, into a cache; all candidates follow in one more forward pass. Greedy decoding gives an
answer exactly if every token of it is the most likely one after those before it, so nothing has to be generated. Scores
are those of `nsa.model.loss`, in fp32; Transformers rounds the logits of a bf16 model, and may then generate the other
one of two tokens that are almost equally likely.

N candidates · n tokens of the longest candidate · D model dim · V vocabulary
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from nsa.core.probe import probing
from nsa.core.selection_quality import SelectionProbe
from nsa.model.loss import IGNORE, linear_token_scores
from nsa_train.infer.evaluation.far_tasks import FarExample

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
    nats_N = scores.losses.view(labels_Nn.shape).sum(1, dtype=torch.float64).tolist()
    hits_N = scores.hits.view(labels_Nn.shape).sum(1).tolist()
    return [
        CandidateScore(-nats, hits == len(tokens), len(tokens))
        for nats, hits, tokens in zip(nats_N, hits_N, candidates, strict=True)
    ]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
