"""Quality of block selection on held-out rows, by layer: how often, and how much of dense attention, it catches.

On synthetic rows, which say where the fact of every answer lies, also whether the selected blocks hold it.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nsa.core.probe import probing
from nsa.core.selection_quality import SelectionCounts, SelectionProbe, chance_of_block
from nsa.hf.modeling import NSAForCausalLM
from nsa.model.loss import linear_token_scores
from nsa_train.data.rows.batch import Batch
from nsa_train.data.rows.synthetic import AnswerPlace
from nsa_train.infer.evaluation.held_out import last_hidden_states

_AnswerPlaces = Callable[[np.ndarray], Sequence[AnswerPlace]]
"""`SyntheticRows.answer_places`."""


@dataclass
class _HitCounts:
    """Questions of one layer, or of all together."""

    questions: int = 0
    hits: int = 0
    """Questions whose fact lies in a selected block."""
    right: int = 0
    right_if_hit: int = 0

    def add(self, hit: bool, right: bool) -> None:
        self.questions += 1
        self.hits += hit
        self.right += right
        self.right_if_hit += hit and right

    @property
    def hit_rate(self) -> float:
        return self.hits / self.questions

    @property
    def accuracy_if_hit(self) -> float | None:
        return self.right_if_hit / self.hits if self.hits else None

    @property
    def accuracy_if_missed(self) -> float | None:
        missed = self.questions - self.hits
        return (self.right - self.right_if_hit) / missed if missed else None


@dataclass
class FactHits:
    """Hits of every layer that selects blocks, in any group, and of any layer."""

    by_layer: list[_HitCounts] = field(default_factory=list)
    any_layer: _HitCounts = field(default_factory=_HitCounts)

    def add(self, selected_by_layer: Sequence[Collection[int]], fact_blocks: set[int], right: bool) -> None:
        """Count a question: the blocks that each layer selected, those of the fact, and whether the answer is right."""
        self.by_layer = self.by_layer or [_HitCounts() for _ in selected_by_layer]
        hits = [not fact_blocks.isdisjoint(blocks) for blocks in selected_by_layer]
        for counts, hit in zip(self.by_layer, hits, strict=True):
            counts.add(hit, right)
        self.any_layer.add(any(hits), right)


@dataclass
class _FactFigures:
    """Hits on the facts of questions. Left out: facts in blocks that are always selected, queries that take all. With
    layers of kind `merged`, blocks are those before the window, also in the chances of other layers."""

    hits: FactHits = field(default_factory=FactHits)
    expected_by_layer: float = 0.0
    """Hits of one layer by chance; the same for all."""
    expected: float = 0.0
    """Hits of any layer by chance."""


@dataclass
class _SelectionFigures:
    counts: list[tuple[int, SelectionCounts]] = field(default_factory=list)
    """(number of the layer, its counts) for every layer that selects blocks."""
    facts: _FactFigures = field(default_factory=_FactFigures)


@torch.inference_mode()
def selection_by_layer(
    model: NSAForCausalLM,
    rows: Iterable[Batch],
    after_row: Callable[[], None] = lambda: None,
    answer_places: _AnswerPlaces = lambda row_ids: (),
) -> _SelectionFigures:
    """Measure what each layer selects on these rows.

    answer_places: where the questions and facts of rows with these numbers lie.
    """
    figures = _SelectionFigures()
    with probing(model, SelectionProbe) as probes:
        # Names are model.layers.N.attention.
        numbered = [(int(name.split(".")[2]), probe) for name, probe in probes.items()]
        for batch in rows:
            places = answer_places(batch.row_ids)
            for probe in probes.values():
                probe.keep = [place.query for place in places]
            hidden_BSD = last_hidden_states(model, batch)
            chosen = [probe.chosen_BQGN for probe in probes.values() if probe.chosen_BQGN is not None]
            if places and chosen:
                _add_facts(figures.facts, model, batch, places, hidden_BSD, chosen)
            after_row()
    figures.counts = [(layer, probe.counts) for layer, probe in numbered if probe.chosen_BQGN is not None]
    return figures


def right_answers(model: NSAForCausalLM, batch: Batch, places: Sequence[AnswerPlace], hidden_BSD: Tensor) -> list[bool]:
    """Whether the model gets the counted token of each place right; hidden_BSD: its last hidden states."""
    row_Q, query_Q, _ = (torch.tensor(column) for column in zip(*places, strict=True))
    label_Q = torch.from_numpy(batch.tokens.astype(np.int64))[row_Q, query_Q + 1].to(hidden_BSD.device)
    right: list[bool] = linear_token_scores(hidden_BSD[row_Q, query_Q], model.lm_head.weight, label_Q).hits.tolist()
    return right


def _add_facts(
    facts: _FactFigures,
    model: NSAForCausalLM,
    batch: Batch,
    places: Sequence[AnswerPlace],
    hidden_BSD: Tensor,
    chosen: Sequence[Tensor],
) -> None:
    right_Q = right_answers(model, batch, places, hidden_BSD)
    row_Q = torch.tensor([place.row for place in places])
    # Place i is the i-th query that was kept, in its own row.
    blocks = [layer_BQGN.cpu()[row_Q, torch.arange(len(places))].flatten(1).tolist() for layer_BQGN in chosen]
    n_groups = chosen[0].shape[2]
    before_window = model.config.w if "merged" in model.config.layer_kinds() else 0
    for i, place in enumerate(places):
        block = place.fact // model.config.l_sel
        chance = chance_of_block(place.query - before_window, block, model.config.l_sel, model.config.n_sel)
        if chance is not None:
            facts.hits.add([layer[i] for layer in blocks], {block}, right_Q[i])
            facts.expected_by_layer += 1 - (1 - chance) ** n_groups
            facts.expected += 1 - (1 - chance) ** (n_groups * len(blocks))


def selection_record(figures: _SelectionFigures, data: str, seq_len: int, rows: int) -> dict[str, Any]:
    """The result as it is written to the file of results."""
    layers = [
        {
            "layer": layer,
            "queries": counts.queries,
            "hit_rate": counts.hits / counts.queries,
            "chance": counts.expected_hits / counts.queries,
            "mass_caught": counts.mass_caught / counts.queries,
            **mass_shares(counts),
        }
        for layer, counts in figures.counts
        if counts.queries
    ]
    facts = figures.facts
    result = {"data": data, "seq_len": seq_len, "rows": rows, "layers": layers}
    if not facts.hits.any_layer.questions:
        return result
    by_layer = [
        {"layer": layer, **_hit_record(counts, facts.expected_by_layer)}
        for (layer, _), counts in zip(figures.counts, facts.hits.by_layer, strict=True)
    ]
    any_layer = _hit_record(facts.hits.any_layer, facts.expected)
    return {**result, "facts": {"layers": by_layer, "any_layer": any_layer}}


def mass_shares(counts: SelectionCounts) -> dict[str, float]:
    """Distribution of dense attention's mass over all keys, for queries that could not read every key."""
    return {name: getattr(counts, name) / counts.queries for name in ("window_mass", "forced_mass", "scored_mass")}


def _hit_record(counts: _HitCounts, expected: float) -> dict[str, Any]:
    return {
        "questions": counts.questions,
        "chance": expected / counts.questions,
        "fact_hit": counts.hit_rate,
        "accuracy": counts.right / counts.questions,
        "accuracy_if_hit": counts.accuracy_if_hit,
        "accuracy_if_missed": counts.accuracy_if_missed,
    }
