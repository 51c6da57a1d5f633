from itertools import combinations, product

import pytest

from tests.covering_cases import each_pair, each_value

LISTS = [["a", "b", "c"], [1, 2], [None, True, "x", 0.5]]


def by_day(params) -> list[tuple]:
    return [param.values for param in params if not param.marks]


@pytest.mark.parametrize("cover", [each_pair, each_value])
def test_at_night_the_rest_of_the_product_follows(cover):
    params = cover(*LISTS)
    assert [param.values for param in params] == list(product(*LISTS))
    assert {bool(param.marks) for param in params} == {True, False}


def test_every_pair_of_values_is_there_for_every_change():
    cases = by_day(each_pair(*LISTS))
    for one, other in combinations(range(3), 2):
        assert {(case[one], case[other]) for case in cases} == set(product(LISTS[one], LISTS[other]))
    assert len(cases) < 16


def test_every_value_is_there_for_every_change():
    cases = by_day(each_value(*LISTS))
    assert [{case[place] for case in cases} for place in range(3)] == [set(values) for values in LISTS]
    assert len(cases) == 4
