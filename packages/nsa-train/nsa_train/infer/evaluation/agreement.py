"""How far a model predicts what a reference model predicts, on held-out rows, in total and by position in the document.

B rows · S tokens · N tokens of all rows · D model dim
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from nsa.errors import ConfigError
from nsa.hf.modeling import NSAForCausalLM
from nsa.model.loss import AgreementScores, TokenScores, linear_agreement
from nsa_train.data.rows.batch import Batch
from nsa_train.infer.evaluation.held_out import last_hidden_states
from nsa_train.train.held_out_loss import LossSums, next_token_labels, positions_in_documents


@dataclass
class AgreementSums:
    """Sums over the tokens of the same rows; errors of differences are those of pairs, row by row."""

    own: LossSums
    reference: LossSums
    difference: LossSums
    """Difference of the losses, own minus reference; its hits are tokens where both have the same most likely token."""
    divergence: LossSums
    """KL(reference ‖ own); its hits mean nothing."""

    @classmethod
    def empty(cls, bytes_per_token_V: Tensor | None = None) -> Self:
        return cls(LossSums(bytes_per_token_V), LossSums(bytes_per_token_V), LossSums(), LossSums())

    def add(self, scores_BS: AgreementScores, labels_BS: Tensor, position_BS: Tensor) -> None:
        own, reference = scores_BS.own, scores_BS.reference
        difference_BS = own.losses.double() - reference.losses.double()
        parts = (
            (self.own, own),
            (self.reference, reference),
            (self.difference, TokenScores(difference_BS, scores_BS.same_top)),
            (self.divergence, TokenScores(scores_BS.divergence, scores_BS.same_top)),
        )
        for sums, values_BS in parts:
            sums.add(values_BS, labels_BS, position_BS)


def require_same_vocabulary(model: NSAForCausalLM, reference: NSAForCausalLM) -> None:
    """Distributions over different vocabularies cannot be compared."""
    sizes = model.config.vocab_size, reference.config.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"--against needs a model with the same vocabulary: the models have {sizes[0]} and {sizes[1]} ids. Name "
            f"the model that this one was converted or trained from."
        )


@torch.inference_mode()
def agreement_with(
    model: NSAForCausalLM,
    reference: NSAForCausalLM,
    batches: Iterable[Batch],
    *,
    bytes_per_token_V: Tensor | None = None,
    after_batch: Callable[[], None] = lambda: None,
) -> AgreementSums:
    """One pass over the rows, through both models."""
    sums = AgreementSums.empty(bytes_per_token_V)
    for batch in batches:
        hidden_BSD = last_hidden_states(reference, batch)
        sums.add(*compared_tokens(model, last_hidden_states(model, batch), reference, hidden_BSD, batch))
        after_batch()
    return sums


def compared_tokens(
    model: NSAForCausalLM, hidden_BSD: Tensor, reference: NSAForCausalLM, reference_BSD: Tensor, batch: Batch
) -> tuple[AgreementScores, Tensor, Tensor]:
    """Scores, labels and positions [B, S] of a batch, from the last hidden states of both models."""
    labels_BS = next_token_labels(batch)
    agreement = linear_agreement(
        hidden_BSD.flatten(0, 1),
        model.lm_head.weight,
        reference_BSD.flatten(0, 1),
        reference.lm_head.weight,
        labels_BS.flatten().to(model.device),
    )

    def by_row(values: Tensor) -> Tensor:
        return values.view(labels_BS.shape).cpu()

    own, reference_scores = (TokenScores(*map(by_row, part)) for part in (agreement.own, agreement.reference))
    scores_BS = AgreementScores(own, reference_scores, by_row(agreement.same_top), by_row(agreement.divergence))
    return scores_BS, labels_BS, positions_in_documents(batch)


def agreement_record(sums: AgreementSums, data: str, seq_len: int, against: str) -> dict[str, Any]:
    """The result as it is written to the file of results. The fields of the reference begin with `against`."""
    parts = (sums.own, sums.reference, sums.difference, sums.divergence)
    total = dict(zip(("tokens", "rows"), (int(sums.own.tokens), sums.own.rows), strict=True))
    by_position = [
        {"begin": own.begin, "end": own.end, "tokens": own.tokens, **_figures(own, *others)}
        for own, *others in zip(*(part.by_position() for part in parts), strict=True)
    ]
    head = {"data": data, "seq_len": seq_len, "against": against}
    return {**head, **total, **_figures(*parts), "by_position": by_position}


def _figures(own: Any, reference: Any, difference: Any, divergence: Any) -> dict[str, Any]:
    return {
        "loss": own.loss,
        "against_loss": reference.loss,
        "difference": difference.loss,
        "difference_standard_error": difference.standard_error,
        "same_top": difference.accuracy,
        "divergence": divergence.loss,
        "divergence_standard_error": divergence.standard_error,
    }
