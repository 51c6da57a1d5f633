import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nsa.errors import ConfigError
from nsa_train.data.rows.packing import PackedRow, make_packer
from tests.nsa_train.data.shard_sets import EOS, MemoryStream

DTYPE = np.dtype(np.uint16)
LENGTHS = st.lists(st.integers(0, 70), min_size=1, max_size=60)


def _docs(lengths: list[int]) -> list[tuple[str, np.ndarray]]:
    """Every token of every document is distinct, so a lost or repeated one cannot hide."""
    starts = np.cumsum([0, *lengths])
    return [
        (f"d{i}", np.arange(a, a + n).astype(np.uint16) + 1000)
        for i, (a, n) in enumerate(zip(starts, lengths, strict=False))
    ]


def _pack(packing: str, docs: list[tuple[str, np.ndarray]], seq_len: int, skip: int = 0) -> list[PackedRow]:
    packer = make_packer(packing, seq_len=seq_len, eos_id=EOS, dtype=DTYPE, buffer_rows=3)
    return list(packer.rows(iter(MemoryStream(docs)), skip))


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@given(lengths=LENGTHS, seq_len=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_every_token_is_packed_exactly_once(packing: str, lengths: list[int], seq_len: int) -> None:
    docs = _docs(lengths)
    rows = _pack(packing, docs, seq_len)
    rebuilt: dict[str, dict[int, list[int]]] = {}
    for row in rows:
        at = 0
        for segment in row.segments:
            piece = row.tokens[at : at + segment.length].tolist()
            assert segment.offset not in rebuilt.setdefault(segment.doc_id, {})
            rebuilt[segment.doc_id][segment.offset] = piece
            at += segment.length
        assert at + row.padding == seq_len
    joined = {doc: [t for offset in sorted(parts) for t in parts[offset]] for doc, parts in rebuilt.items()}
    assert joined == {doc: [*tokens.tolist(), EOS] for doc, tokens in docs}
    assert sum(row.documents for row in rows) == len(docs)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@given(lengths=LENGTHS, seq_len=st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_boundaries_are_exactly_where_documents_meet(packing: str, lengths: list[int], seq_len: int) -> None:
    for row in _pack(packing, _docs(lengths), seq_len):
        cu = row.cu_doc_lens
        assert cu.dtype == np.int32
        assert (cu[0], cu[-1]) == (0, seq_len)
        assert (np.diff(cu) > 0).all()
        expected = np.cumsum([0, *(s.length for s in row.segments), *([row.padding] if row.padding else [])])
        assert cu.tolist() == expected.tolist()
        assert (row.tokens[seq_len - row.padding :] == EOS).all()


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@given(lengths=LENGTHS, seq_len=st.integers(2, 40), data=st.data())
@settings(max_examples=60, deadline=None)
def test_continuing_after_any_row_gives_the_same_rest(packing: str, lengths: list[int], seq_len: int, data) -> None:
    docs = _docs(lengths)
    rows = _pack(packing, docs, seq_len)
    cut = data.draw(st.integers(0, len(rows) - 1))
    stream = MemoryStream(docs)
    stream.load_state_dict(stream.state_before(rows[cut].resume.document))
    packer = make_packer(packing, seq_len=seq_len, eos_id=EOS, dtype=DTYPE, buffer_rows=3)
    rest = list(packer.rows(iter(stream), rows[cut].resume.skip))
    assert [r.tokens.tolist() for r in rest] == [r.tokens.tolist() for r in rows[cut + 1 :]]
    assert [r.segments for r in rest] == [r.segments for r in rows[cut + 1 :]]


def test_concat_pads_the_last_row_only() -> None:
    rows = _pack("concat", _docs([30] * 20), 16)
    assert [row.padding for row in rows[:-1]] == [0] * (len(rows) - 1)


def test_best_fit_keeps_short_documents_whole_and_wastes_little() -> None:
    rng = np.random.default_rng(0)
    docs = _docs(rng.integers(10, 120, 600).tolist())
    packer = make_packer("best_fit", seq_len=256, eos_id=EOS, dtype=DTYPE, buffer_rows=64)
    rows = list(packer.rows(iter(MemoryStream(docs))))
    assert all(segment.offset == 0 for row in rows for segment in row.segments)
    assert sum(row.padding for row in rows) / (len(rows) * 256) < 0.05


def test_unknown_packing_is_named() -> None:
    with pytest.raises(ConfigError):
        make_packer("tetris", seq_len=8, eos_id=EOS, dtype=DTYPE)  # type: ignore[arg-type]
