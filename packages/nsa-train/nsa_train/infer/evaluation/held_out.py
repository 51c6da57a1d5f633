"""Held-out loss of a loaded model: its data, and the forward pass that scores every token.

B rows · S tokens · N tokens of all rows · D model dim · V vocabulary
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nsa.errors import ConfigError
from nsa.hf.modeling import NSAForCausalLM
from nsa.model.loss import TokenScores, linear_token_scores
from nsa_train import names
from nsa_train.checkpoint.trained_model import open_trained_model
from nsa_train.data.rows.batch import Batch, EndOfData
from nsa_train.data.rows.specs import DirectData, PreparedData, RowData, SyntheticData
from nsa_train.data.shards.manifest import MANIFEST_NAME, VALIDATION
from nsa_train.infer.load_model import LoadedModel
from nsa_train.train import datasets
from nsa_train.train.held_out_loss import LossSums, ScoreTokens, batch_inputs

_DEFAULT_ROWS = 256


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
