"""Runs the programs of interpreted or emulated Triton kernels in another order than first to last, as a GPU may.

A kernel that computes the same bits in every order has no program that depends on what another one writes.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from unittest import mock

from proofs.ptx_emulator.pytest_plugin import emulator

Order = Callable[[int], list[int]]
"""In which order to run n programs."""


def backwards(n: int) -> list[int]:
    return list(range(n - 1, -1, -1))


def shuffled(n: int) -> list[int]:
    return random.Random(n).sample(range(n), n)


ORDERS: dict[str, Order] = {"backwards": backwards, "shuffled": shuffled}


@contextmanager
def programs_run(order: Order) -> Iterator[list[int]]:
    """Run every kernel launched inside in this order. Yields the programs run, so that a test can see that some
    were."""
    if (driver := emulator()) is not None:
        before, driver.order, driver.ran = driver.order, order, []
        try:
            yield driver.ran
        finally:
            driver.order = before
        return
    from triton.runtime.interpreter import interpreter_builder as builder

    place, ran = builder.set_grid_idx, []
    orders: dict[int, list[int]] = {}

    def place_another(x: int, y: int, z: int) -> None:
        _, n_y, n_z = builder.grid_dim
        n = prod(builder.grid_dim)
        flat = orders.setdefault(n, order(n))[(x * n_y + y) * n_z + z]
        ran.append(flat)
        place(flat // (n_y * n_z), flat // n_z % n_y, flat % n_z)

    with mock.patch.object(builder, "set_grid_idx", place_another):
        yield ran
