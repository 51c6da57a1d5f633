"""Held-out rows of a loaded model: the loss on them, and how far it predicts what a reference model predicts.

B rows · S tokens · N tokens of all rows · D model dim · V vocabulary
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.errors import ConfigError
from nsa.hf.modeling import NSAForCausalLM
from nsa.model.loss import AgreementScores, TokenScores, linear_agreement, linear_token_scores
from nsa_train import names
from nsa_train.checkpoint.trained_model import open_trained_model
from nsa_train.data.rows.batch import Batch, EndOfData
from nsa_train.data.rows.specs import DirectData, PreparedData, RowData, SyntheticData
from nsa_train.data.shards.manifest import MANIFEST_NAME, VALIDATION
from nsa_train.infer.load_model import LoadedModel
from nsa_train.train import datasets
from nsa_train.train.held_out_loss import LossSums, ScoreTokens, batch_inputs, next_token_labels, positions_in_documents


def held_out_data(loaded: LoadedModel, source: str | None, seq_len: int | None) -> RowData:
    """Rows that training never saw: the held-out split of the run, or `source`.

    source: a prepared set, of which the validation split is read, or documents, which are read whole.
    """
    checkpoint = loaded.source.path
    if source is not None:
        return _data_at(source, loaded, seq_len or loaded.trained_length)
    if names.step_of(checkpoint.name) is None:
        raise ConfigError(f"{checkpoint} does not say which data it was trained on. Give held-out data with --data.")
    trained = open_trained_model(checkpoint)
    data = datasets.held_out_rows(trained.config, trained.vocab_size)
    if isinstance(data, DirectData) and data.held_out_fraction == 0:
        raise ConfigError("data.held_out is 0 in the run's settings: it held nothing out. Give other data with --data.")
    return replace(data, seq_len=seq_len) if seq_len else data


def _data_at(source: str, loaded: LoadedModel, seq_len: int) -> RowData:
    folder = loaded.source.path if loaded.source.path.is_dir() else loaded.source.path.parent
    if not (folder / names.TOKENIZER).is_file():
        raise ConfigError(f"{folder} has no {names.TOKENIZER}, so --data cannot be read. Evaluate the run's own data.")
    tokenizer = str(folder)
    if "://" in source or (Path(source) / MANIFEST_NAME).is_file():
        return PreparedData(source, seq_len, split=VALIDATION, shuffle=False, max_epochs=1, tokenizer=tokenizer)
    return DirectData(source, tokenizer, seq_len, at_end="stop")


def rows_of(data: RowData, most: int | None) -> Iterator[Batch]:
    """Batches of one row, so that every row is read; synthetic rows never end and need a limit."""
    if most is None and isinstance(data, SyntheticData):
        raise ConfigError(f"{data} never end. Give a number of rows with --rows.")
    stream, done = data.open(), 0
    try:
        while most is None or done < most:
            yield stream.next_batch(1)
            done += 1
    except EndOfData:
        return
    finally:
        stream.close()


def model_token_scores(model: NSAForCausalLM) -> ScoreTokens:
    """Scores of every token by a Transformers model, without ever holding all logits."""

    @torch.inference_mode()
    def score_tokens(batch: Batch, labels_BS: Tensor) -> TokenScores:
        x_ND = last_hidden_states(model, batch).flatten(0, 1)
        scores_N = linear_token_scores(x_ND, model.lm_head.weight, labels_BS.flatten().to(model.device))
        return TokenScores(*(each.view(labels_BS.shape) for each in scores_N))

    return score_tokens


def last_hidden_states(model: NSAForCausalLM, batch: Batch) -> Tensor:
    """Hidden states [B, S, D] that the head of the model reads; documents of a row are separate."""
    tokens_BS, cu_doc_lens = batch_inputs(batch)
    cu_doc_lens = None if cu_doc_lens is None else cu_doc_lens.to(model.device)
    outputs = model.model(input_ids=tokens_BS.to(model.device), cu_seq_lens_q=cu_doc_lens, use_cache=False)
    hidden_BSD: Tensor = outputs.last_hidden_state
    return hidden_BSD


def bytes_per_token(tokenizer: Any, vocab_size: int) -> Tensor | None:
    """Bytes of text that each id stands for [V], 0 for special tokens; None unless the tokenizer is byte-level.

    The vocabulary of a byte-level tokenizer spells every byte as one character.
    """
    if type(tokenizer.backend_tokenizer.decoder).__name__ != "ByteLevel":
        return None
    bytes_V = torch.zeros(vocab_size)
    special = set(tokenizer.all_special_ids)
    for text, number in tokenizer.get_vocab().items():
        if number not in special:
            bytes_V[number] = len(text)
    return bytes_V


def held_out_record(sums: LossSums, data: RowData) -> dict[str, Any]:
    """The result as it is written to the file of results."""
    return {
        "data": str(data),
        "seq_len": data.seq_len,
        "rows": sums.rows,
        "tokens": int(sums.tokens),
        "loss": sums.loss,
        "standard_error": sums.standard_error,
        "bits_per_byte": sums.bits_per_byte,
        "accuracy": sums.accuracy,
        "by_position": [each._asdict() for each in sums.by_position()],
    }


class AgreementSums:
    """Sums over the tokens of the same rows; errors of differences are those of pairs, row by row."""

    def __init__(self, bytes_per_token_V: Tensor | None = None) -> None:
        self.own, self.reference = LossSums(bytes_per_token_V), LossSums(bytes_per_token_V)
        self.difference = LossSums()
        """Difference of the losses, own minus reference; its hits are tokens where both have the same most likely
        token."""
        self.divergence = LossSums()
        """KL(reference ‖ own); its hits mean nothing."""

    def add(self, scores_BS: AgreementScores, labels_BS: Tensor, position_BS: Tensor) -> None:
        own, reference, same_top_BS = scores_BS.own, scores_BS.reference, scores_BS.same_top
        difference_BS = own.losses.cpu().double() - reference.losses.cpu().double()
        self.own.add(own, labels_BS, position_BS)
        self.reference.add(reference, labels_BS, position_BS)
        self.difference.add(TokenScores(difference_BS, same_top_BS), labels_BS, position_BS)
        self.divergence.add(TokenScores(scores_BS.divergence, same_top_BS), labels_BS, position_BS)


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
    sums = AgreementSums(bytes_per_token_V)
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
    total = {"tokens": int(sums.own.tokens), "rows": sums.own.rows}
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
