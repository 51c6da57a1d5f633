"""Pages of the KV cache: none is lost, none has two writers, and a refusal changes nothing."""

import random

import pytest
import torch

from nsa.core.cache_pages import PageTable
from nsa.errors import ConfigError

CPU = torch.device("cpu")


def consistent(table: PageTable) -> None:
    """Every page is free or counted once for each row that has it; the table's rows are the rows' pages."""
    used = [page for row in table._rows for page in row]
    assert all(table._users[page] == used.count(page) for page in range(table.n_pages))
    assert sorted({*used, *table._free}) == list(range(table.n_pages))
    assert len(table._free) + len(set(used)) == table.n_pages
    for row, pages in zip(table.table_BP.tolist(), table._rows, strict=True):
        assert row[: len(pages)] == pages


@pytest.mark.parametrize("n_pages", [None, 9, 14])
def test_no_page_is_lost_in_random_schedules(n_pages):
    batch, per_row, size = 4, 6, 8
    table, draw = PageTable(batch, per_row, size, n_pages, CPU), random.Random(0)
    lengths, refused, copied = [0] * batch, 0, 0
    for _ in range(3000):
        what = draw.choice(["append"] * 6 + ["crop", "reorder", "reset row", "reset"])
        if what == "append":
            new = [draw.randint(0, min(11, per_row * size - n)) for n in lengths]
            after = [n + more for n, more in zip(lengths, new, strict=True)]
            before = [list(row) for row in table._rows], list(table._users), list(table._free), table.table_BP.clone()
            try:
                copies = table.take(lengths, after)
            except ConfigError:
                refused += 1
                assert before[:3] == (table._rows, table._users, table._free)
                assert torch.equal(before[3], table.table_BP)
                continue
            copied += len(copies.source)
            for row, (begin, end) in enumerate(zip(lengths, after, strict=True)):
                written = table._rows[row][begin // size : -(-end // size)] if end > begin else []
                assert all(table._users[page] == 1 for page in written)
            lengths = after
        elif what == "crop":
            lengths = [draw.randint(0, n) for n in lengths]
            for row, n in enumerate(lengths):
                table.release(row, n)
        elif what == "reorder":
            order = [draw.randrange(batch) for _ in range(batch)]
            table.reorder(order, lengths)
            lengths = [lengths[row] for row in order]
        elif what == "reset row":
            row = draw.randrange(batch)
            lengths[row] = 0
            table.release(row, 0)
        else:
            lengths = [0] * batch
            table.release_all()
            assert n_pages is None or table.n_free == n_pages
        consistent(table)
        room = table.headroom(lengths)
        for row, n in enumerate(lengths):
            pages = table._rows[row][n // size : -(-(n + room) // size)]
            assert len(table._rows[row]) * size >= n + room
            assert all(table._users[page] == 1 for page in pages) or not room
    assert copied
    assert refused or n_pages is None  # a pool with pages for every row never refuses


def test_rows_ask_for_more_at_the_same_step():
    """However their lengths differ: otherwise some row would need the host at almost every step."""
    table = PageTable(4, 8, 8, 32, CPU)
    lengths, asked = [0, 3, 5, 7], 0
    table.take([0] * 4, lengths)
    for _ in range(48):
        if not table.headroom(lengths):
            asked += 1
            table.take(lengths, [n + 1 for n in lengths])
        lengths = [n + 1 for n in lengths]
    assert asked <= 48 / 8 + 1


def test_a_pool_with_too_few_pages_says_how_many_are_needed():
    table = PageTable(2, 8, 8, 3, CPU)
    table.take([0, 0], [8, 9])
    with pytest.raises(ConfigError, match=r"3 pages of 8 tokens.*pages=5 or more"):
        table.take([8, 9], [20, 16])
