"""Matrices that were assembled from registers, kept until the registers change."""

from collections.abc import Callable

from proofs.ptx_emulator.state import Array, LaneState


class FragmentCache:
    """Matrices of registers already converted: an A fragment multiplies many B fragments, a product is added to.

    By the identity of the registers' values, which are never changed in place.
    """

    def __init__(self, state: LaneState) -> None:
        self._state = state
        self._known: dict[tuple[object, ...], tuple[list[Array], Array]] = {}

    def begin(self) -> None:
        """Before each batch: constants are the same values in all of them, for other numbers of programs."""
        self._known.clear()

    def get(self, kind: str, slots: list[int], convert: Callable[[list[Array]], Array]) -> Array:
        values = [self._state.values[slot] for slot in slots]
        key = (kind, *map(id, values))
        if key not in self._known:
            self.put(kind, values, convert([self._state.by_warp(x) for x in values]))
        return self._known[key][1]

    def put(self, kind: str, values: list[Array], matrix: Array) -> None:
        if len(self._known) > 256:
            self._known.clear()
        self._known[kind, *map(id, values)] = (values, matrix)
