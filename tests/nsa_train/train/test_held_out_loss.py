"""Held-out loss and accuracy against sums by hand, one token at a time."""

import math
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import torch

from nsa.model.loss import IGNORE, TokenScores
from nsa_train.data.rows.batch import Batch, EndOfData
from nsa_train.data.rows.specs import DirectData, PreparedData
from nsa_train.train.held_out_loss import LossSums, held_out_loss, next_token_labels, positions_in_documents
from tests.nsa_train.data.shard_sets import documents, write_set

S = 700


def batch(seed: int = 0, rows: int = 3, masked: bool = True, mask_document_ends: bool = True) -> Batch:
    random = np.random.default_rng(seed)
    cu = [
        np.array([0, *sorted(random.choice(np.arange(1, S), r % 3, replace=False)), S], np.int32) for r in range(rows)
    ]
    mask = np.ones((rows, S), bool)
    mask[-1, S - 50 :] = not masked
    return Batch(
        tokens=random.integers(0, 256, (rows, S)).astype(np.uint16),
        cu_doc_lens=tuple(cu),
        loss_mask=mask if masked else None,
        row_ids=np.arange(rows),
        epoch=0,
        documents=0,
        mask_document_ends=mask_document_ends,
    )


def scores_of(rows: Batch, labels_BS: torch.Tensor) -> TokenScores:
    """Deterministic, different for every token, and wrong where nothing may be read; small tokens are hits."""
    tokens = torch.from_numpy(rows.tokens.astype(np.float32))
    ignored = labels_BS == IGNORE
    return TokenScores((tokens / 32 + torch.arange(S) / S).masked_fill(ignored, math.inf), (tokens < 77) | ignored)


def by_hand(batches: list[Batch]) -> list[tuple[int, int, float, bool, int]]:
    """(row, position in its document, loss, hit, label) of every token that counts."""
    tokens_scored = []
    for number, each in enumerate(batches):
        for r, (tokens, cu) in enumerate(zip(each.tokens, each.cu_doc_lens, strict=True)):
            for at in range(S - 1):
                if each.mask_document_ends and at + 1 in cu:
                    continue
                if each.loss_mask is None or each.loss_mask[r, at + 1]:
                    begin = max(int(edge) for edge in cu if edge <= at)
                    loss = float(np.float32(tokens[at]) / np.float32(32) + np.float32(at) / np.float32(S))
                    tokens_scored.append((1000 * number + r, at - begin, loss, tokens[at] < 77, int(tokens[at + 1])))
    return tokens_scored


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_equals_sums_by_hand(masked, ends):
    batches = [batch(seed, rows, masked, ends) for seed, rows in ((0, 3), (1, 4))]
    calls = []
    sums = held_out_loss(
        batches, scores_of, bytes_per_token_V=torch.arange(256), after_batch=lambda: calls.append(None)
    )
    expected = by_hand(batches)
    assert len(calls) == 2
    assert sums.tokens == len(expected)
    assert sums.loss == pytest.approx(np.mean([loss for _, _, loss, _, _ in expected]), rel=1e-6)
    assert sums.accuracy == pytest.approx(np.mean([hit for *_, hit, _ in expected]))
    total_bits = sum(loss for _, _, loss, _, _ in expected) / math.log(2)
    assert sums.bits_per_byte == pytest.approx(total_bits / sum(label for *_, label in expected), rel=1e-6)
    assert sums.standard_error == pytest.approx(error_by_hand([(row, loss) for row, _, loss, *_ in expected]), rel=1e-6)
    ranges = sums.by_position()
    assert [(each.begin, each.end) for each in ranges] == [(0, 128), (128, 256), (256, 512), (512, 1024)]
    assert sum(each.tokens for each in ranges) == len(expected)
    for each in ranges:
        inside = [(row, loss, label) for row, at, loss, _, label in expected if each.begin <= at < each.end]
        assert each.tokens == len(inside)
        assert each.loss == pytest.approx(np.mean([loss for _, loss, _ in inside]), rel=1e-6)
        assert each.accuracy == pytest.approx(
            np.mean([hit for _, at, _, hit, _ in expected if each.begin <= at < each.end])
        )
        bits = sum(loss for _, loss, _ in inside) / math.log(2)
        assert each.bits_per_byte == pytest.approx(bits / sum(label for *_, label in inside), rel=1e-6)
        assert each.standard_error == pytest.approx(error_by_hand([(row, loss) for row, loss, _ in inside]), rel=1e-6)


def error_by_hand(inside: list[tuple[int, float]]) -> float:
    """Rows are the samples: residuals of each row's sum around the common mean."""
    mean = np.mean([loss for _, loss in inside])
    rows = sorted({row for row, _ in inside})
    residuals = [sum(loss - mean for row, loss in inside if row == each) for each in rows]
    return math.sqrt(sum(r * r for r in residuals) * len(rows) / (len(rows) - 1)) / len(inside)


def test_the_total_is_the_plain_sum_in_double_precision():
    """Bit for bit what val.csv has always held."""
    batches = [batch(2), batch(3)]
    nats = tokens = 0.0
    for each in batches:
        labels = next_token_labels(each)
        losses = scores_of(each, labels).losses.double().masked_fill(labels == IGNORE, 0)
        nats, tokens = nats + float(losses.sum()), tokens + float((labels != IGNORE).sum())
    sums = held_out_loss(batches, scores_of)
    assert (sums.nats, sums.tokens) == (nats, tokens)
    assert sums.bits_per_byte is None
    assert all(each.bits_per_byte is None for each in sums.by_position())


def test_one_row_has_no_standard_error_and_no_rows_no_loss():
    sums = LossSums()
    assert (sums.loss, sums.accuracy, sums.standard_error, sums.by_position()) == (0.0, 0.0, None, [])
    scores = TokenScores(torch.ones(1, 4), torch.tensor([[True, False, False, True]]))
    sums.add(scores, torch.tensor([[1, 2, 3, IGNORE]]), torch.arange(4)[None])
    (only_range,) = sums.by_position()
    assert (only_range.loss, only_range.tokens, only_range.standard_error, only_range.accuracy) == (1.0, 3, None, 1 / 3)


def test_positions_restart_with_every_document():
    packed = batch(4)
    for row, cu in zip(positions_in_documents(packed).tolist(), packed.cu_doc_lens, strict=True):
        assert [at for at, position in enumerate(row) if position == 0] == cu[:-1].tolist()
        assert max(row) == max(np.diff(cu)) - 1


@pytest.mark.parametrize("mask_document_ends", [True, False])
@pytest.mark.parametrize("kind", ["concat", "best_fit", "prepared"])
def test_labels_are_of_the_same_document(tmp_path, kind, mask_document_ends):
    """Checks the provenance, token by token: other documents' first tokens are labels only where that was asked for."""
    if kind == "prepared":
        write_set(tmp_path, documents(60))
        data = PreparedData(str(tmp_path), 32, max_epochs=1, with_provenance=True)
    else:
        for number in range(60):
            (tmp_path / f"{number}.txt").write_text("x" * (number * 7 % 90) + "y")
        data = DirectData(str(tmp_path), "byte", 32, at_end="stop", packing=kind)
    data = replace(data, mask_document_ends=mask_document_ends)
    stream, same, other, ends, pieces = data.open(), 0, 0, 0, 0
    with suppress(EndOfData):
        while True:
            one = stream.next_batch(1)
            tokens, labels = one.tokens[0].tolist(), next_token_labels(one)[0].tolist()
            document = [segment.doc_id for segment in one.provenance[0] for _ in range(segment.length)]
            document += [None] * (len(tokens) - len(document))  # padding
            assert labels[-1] == IGNORE
            for at, label in enumerate(labels[:-1]):
                following = document[at + 1]
                counts = following is not None and (following == document[at] or not mask_document_ends)
                assert label == (tokens[at + 1] if counts else IGNORE)
                same += counts and following == document[at]
                other += counts and following != document[at]
            pieces += len(one.provenance[0])
            ends += one.documents
    assert ends == 60
    assert pieces > 60, "documents are cut over rows"
    assert same > 1000
    assert (other > 20) == (not mask_document_ends)
