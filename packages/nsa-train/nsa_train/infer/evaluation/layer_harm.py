"""Divergence that each sparse layer of a converted model causes, and the layers worth keeping dense.

Layers are exchanged between a model and its dense reference, one at a time, and the distributions over the next token
are compared with those of the reference: KL(reference ‖ variant), mean over the tokens of held-out rows.

- harm of a layer: the divergence of the reference with this layer alone made sparse.
- gain of a layer: by how much the divergence of the sparse model falls with this layer alone made dense.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nsa.core.attention_config import OPTIONS
from nsa.core.selection_quality import SelectionCounts
from nsa.errors import ConfigError
from nsa.hf.configuration import NSAConfig
from nsa.hf.modeling import NSAForCausalLM
from nsa.model.loss import TokenScores
from nsa.options import AttentionKind
from nsa_train.convert.dense.source_model import shortest_pattern
from nsa_train.data.rows.batch import Batch
from nsa_train.infer.evaluation.held_out import compared_tokens, last_hidden_states
from nsa_train.infer.evaluation.selection import mass_shares, selection_by_layer
from nsa_train.train.held_out_loss import LossSums

_KEPT_HARM = 0.5
"""Layers are advised until they have this share of the harm of all."""
_KEPT_LAYERS = 0.25
"""Largest share of the sparse layers that is advised; at least one layer is."""
_SMALLEST_DIVERGENCE = 1e-6
"""Below it the models are equal up to rounding, and no layer is advised."""


_OF_SPARSE_LAYERS = {"attention", *(each.exported for each in OPTIONS if each.setting.startswith("nsa."))}
_NOT_COMPUTED_WITH = {
    *("max_position_embeddings", "initializer_range", "use_cache", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id"),
}


@dataclass
class _LayerHarm:
    layer: int
    kind: AttentionKind
    """Kind of the layer in the sparse model."""
    harm: float
    harm_standard_error: float | None
    gain: float
    counts: SelectionCounts | None = None
    """Counts of the selection; None for a layer that selects no blocks."""


@dataclass
class _HarmfulLayers:
    divergence: float
    """KL(reference ‖ model)."""
    layers: list[_LayerHarm]
    advised: list[int] = field(default_factory=list)
    """Layers to make dense, by `advised_layers`."""
    kept_divergence: float | None = None
    """KL(reference ‖ the model with these layers dense), measured; None if none is advised."""
    already_dense: list[int] = field(default_factory=list)
    """Layers that are dense in both."""

    @property
    def removed(self) -> float | None:
        """Share of the divergence that the advised layers remove."""
        return None if self.kept_divergence is None else 1 - self.kept_divergence / self.divergence


def _advised_layers(harm_by_layer: Sequence[tuple[int, float]]) -> list[int]:
    """The most harmful layers, until they have half of the harm of all, at most a quarter of the sparse layers."""
    total, most = math.fsum(harm for _, harm in harm_by_layer), max(1, int(_KEPT_LAYERS * len(harm_by_layer)))
    layers, reached = list[int](), 0.0
    for layer, harm in sorted(harm_by_layer, key=lambda each: (-each[1], each[0])):
        if len(layers) == most or reached >= _KEPT_HARM * total:
            break
        layers.append(layer)
        reached += harm
    return sorted(layers)


@torch.inference_mode()
def harmful_layers(
    model: NSAForCausalLM,
    reference: NSAForCausalLM,
    rows: Sequence[Batch],
    after_pass: Callable[[], None] = lambda: None,
) -> _HarmfulLayers:
    """Two passes over the rows per layer that differs, one of each model, and one with the advised layers.

    The models must differ in the kinds of their layers alone, as after a conversion; weights may differ by training.
    """
    _require_same_but_kinds(model, reference)
    kinds, dense = model.config.layer_kinds(), reference.config.layer_kinds()
    differing = [layer for layer, pair in enumerate(zip(kinds, dense, strict=True)) if pair[0] != pair[1]]
    if not differing:
        raise ConfigError(
            "the models have the same kind of attention in every layer, so that no layer can be the cause of a "
            "difference. Leave the task out, or name the dense model with --against."
        )
    of_model, of_reference = model.state_dict(), reference.state_dict()
    compare = _Divergence(reference, rows, after_pass)
    whole = compare.of(model).loss
    counts = dict(selection_by_layer(model, rows).counts)
    harms = []
    for layer in differing:
        one_sparse = with_layer_kinds(model.config, _exchanged(dense, kinds, [layer]), {**of_model, **of_reference})
        one_dense = with_layer_kinds(model.config, _exchanged(kinds, dense, [layer]), {**of_reference, **of_model})
        harm = compare.of(one_sparse)
        gain = whole - compare.of(one_dense).loss
        harms.append(_LayerHarm(layer, kinds[layer], harm.loss, harm.standard_error, gain, counts.get(layer)))
    both_dense = [layer for layer, pair in enumerate(zip(kinds, dense, strict=True)) if pair == ("dense", "dense")]
    result = _HarmfulLayers(whole, harms, already_dense=both_dense)
    can_be_dense = [(each.layer, each.harm) for each in harms if dense[each.layer] == "dense"]
    if whole > _SMALLEST_DIVERGENCE and can_be_dense:
        result.advised = _advised_layers(can_be_dense)
        mixed = with_layer_kinds(model.config, _exchanged(kinds, dense, result.advised), {**of_reference, **of_model})
        result.kept_divergence = compare.of(mixed).loss
    return result


def _exchanged(
    kinds: Sequence[AttentionKind], others: Sequence[AttentionKind], layers: Sequence[int]
) -> list[AttentionKind]:
    return [others[layer] if layer in layers else kind for layer, kind in enumerate(kinds)]


class _Divergence:
    """Divergence of variants from a reference, whose hidden states of the rows are computed once."""

    def __init__(self, reference: NSAForCausalLM, rows: Sequence[Batch], after_pass: Callable[[], None]) -> None:
        self._reference, self._rows, self._after_pass = reference, rows, after_pass
        self._hidden: list[Tensor] = [last_hidden_states(reference, batch) for batch in rows]

    def of(self, variant: NSAForCausalLM) -> LossSums:
        sums = LossSums()
        for batch, reference_BSD in zip(self._rows, self._hidden, strict=True):
            hidden_BSD = last_hidden_states(variant, batch)
            scores_BS, *places = compared_tokens(variant, hidden_BSD, self._reference, reference_BSD, batch)
            sums.add(TokenScores(scores_BS.divergence, scores_BS.same_top), *places)
        self._after_pass()
        return sums


def passes_over_rows(model: NSAForCausalLM, reference: NSAForCausalLM) -> int:
    """Count the calls of `after_pass` by `harmful_layers`."""
    pairs = zip(model.config.layer_kinds(), reference.config.layer_kinds(), strict=False)
    return 2 + 2 * sum(own != other for own, other in pairs)


def layers_record(result: _HarmfulLayers, data: str, seq_len: int, rows: int, against: str) -> dict[str, Any]:
    """The result as it is written to the file of results."""
    layers = [
        {
            "layer": each.layer,
            "kind": each.kind,
            "harm": each.harm,
            "harm_standard_error": each.harm_standard_error,
            "gain": each.gain,
            **(mass_shares(each.counts) if each.counts is not None and each.counts.queries else {}),
        }
        for each in result.layers
    ]
    return {
        "data": data,
        "seq_len": seq_len,
        "rows": rows,
        "against": against,
        "divergence": result.divergence,
        "layers": layers,
        "keep_dense": sorted({*result.already_dense, *result.advised}) if result.advised else [],
        "advised": result.advised,
        "removed": result.removed,
    }


def with_layer_kinds(
    config: NSAConfig, kinds: Sequence[AttentionKind], tensors: Mapping[str, Tensor]
) -> NSAForCausalLM:
    """A model with layers of these kinds, which shares its tensors with the model that they come from."""
    arguments = {name: getattr(config, name) for name in NSAConfig.names()}
    arguments["attention"] = shortest_pattern(kinds)
    with torch.device("meta"):  # its tensors are replaced by those that exist
        model = NSAForCausalLM(NSAConfig(**arguments))
    model.load_state_dict({name: tensors[name] for name in model.state_dict()}, assign=True)
    model.tie_weights()
    return model.eval()


def _require_same_but_kinds(model: NSAForCausalLM, reference: NSAForCausalLM) -> None:
    """Raise unless the two differ in kinds and options of sparse layers alone, so that layers can be exchanged."""
    free = _OF_SPARSE_LAYERS | _NOT_COMPUTED_WITH | (set() if model.config.qk_norm else {"qk_norm_eps", "qk_norm_per"})
    for name in NSAConfig.names():
        values = getattr(model.config, name), getattr(reference.config, name)
        if name not in free and (values[0] or None) != (values[1] or None):
            raise ConfigError(
                f"the models have {name} {values[0]} and {values[1]}: layers can be exchanged only between a model and "
                f"the dense model it was converted from. Leave the task out, or name that model with --against."
            )
    own, other = model.state_dict(), reference.state_dict()
    for name in sorted(own.keys() & other.keys()):
        if own[name].shape != other[name].shape:
            raise ConfigError(
                f"{name} is {list(own[name].shape)} in one model and {list(other[name].shape)} in the other: layers "
                f"can be exchanged only if they share keys and values (nsa.kv=shared), as after `nsa convert`. Leave "
                f"the task out."
            )
