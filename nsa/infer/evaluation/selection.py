"""Quality of block selection on held-out rows, by layer: how often, and how much of dense attention, it catches."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from nsa.core.probe import probing
from nsa.core.selection_quality import SelectionCounts, SelectionProbe
from nsa.data.rows.batch import Batch
from nsa.hf.modeling import NSAForCausalLM
from nsa.model.held_out_loss import batch_inputs


@torch.inference_mode()
def selection_by_layer(
    model: NSAForCausalLM, rows: Iterable[Batch], after_row: Callable[[], None] = lambda: None
) -> list[tuple[int, SelectionCounts]]:
    """(number of the layer, its counts) for every layer that selects blocks."""
    with probing(model, SelectionProbe) as probes:
        for batch in rows:
            tokens_BS, cu_doc_lens = batch_inputs(batch)
            cu_doc_lens = None if cu_doc_lens is None else cu_doc_lens.to(model.device)
            model.model(input_ids=tokens_BS.to(model.device), cu_seq_lens_q=cu_doc_lens, use_cache=False)
            after_row()
        # Names are model.layers.N.attention.
        numbered = [(int(name.split(".")[2]), probe) for name, probe in probes.items()]
    return [(layer, probe.counts) for layer, probe in numbered if probe.last_chosen_BGN is not None]


def selection_record(found: list[tuple[int, SelectionCounts]], data: str, seq_len: int, rows: int) -> dict[str, Any]:
    """The result as it is written to the file of results."""
    layers = [
        {
            "layer": layer,
            "queries": counts.queries,
            "hit_rate": counts.hits / counts.queries,
            "chance": counts.expected_hits / counts.queries,
            "mass_caught": counts.mass_caught / counts.queries,
        }
        for layer, counts in found
        if counts.queries
    ]
    return {"data": data, "seq_len": seq_len, "rows": rows, "layers": layers}
