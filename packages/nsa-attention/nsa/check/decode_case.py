"""Decode steps of the self-check: a cache as the model keeps it, filled token by token, every step compared; and steps
of a whole layer.

Slots that hold no token yet are NaN: reading one puts NaN into the output.

B batch · G kv groups · R heads per group · K key dim · V value dim · N chosen blocks
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.check.cases import DECODE_STEPS, KernelCase
from nsa.check.comparison import SELECTION_LIMIT, CheckResult, Results, blocks_error, bounded, relative_rms, tolerance
from nsa.check.kernel_call import CPU, REFERENCE, plain_attention
from nsa.core.nsa_attention import NSAAttention
from nsa.kernels import reference
from nsa.kernels.interface import CachedKeys, CacheView, KeyPages, TokenDecoder
from nsa.kernels.registry import BACKENDS, backend_request

_WIDTH = 64
_BLOCKS = 8
"""Compressed blocks of the longer row of a `StepCase`."""


class _Stream(NamedTuple):
    """Every token's keys and values on the CPU, [B, n, G, K or V]."""

    k: Tensor
    v: Tensor


class DecodeCase:
    """A layer with three branches, each with keys of its own."""

    name = "decode"

    def __init__(self, case: KernelCase, dtype: torch.dtype) -> None:
        self.shape, self.geometry, self.dtype = case.shape, case.shape.geometry, dtype
        self.lengths, self.capacity, self.batch = case.decode_lengths, case.length, len(case.decode_lengths)
        self.scale = float(self.shape.d_k**-0.5)
        generator = torch.Generator().manual_seed(1)
        s, n_compressed = self.shape, self.geometry.n_compressed(self.capacity)

        def tensor(*shape: int) -> Tensor:
            return torch.randn(self.batch, *shape, generator=generator).to(dtype)

        def stream(n: int) -> _Stream:
            return _Stream(tensor(n, s.n_kv_groups, s.d_k), tensor(n, s.n_kv_groups, s.d_v))

        self.tail, self.selected, self.window = (stream(self.capacity) for _ in range(3))
        self.compressed = stream(n_compressed)
        self.q_steps = [tensor(1, s.n_kv_groups, s.heads_per_group, s.d_k) for _ in range(DECODE_STEPS)]
        self.gates = torch.rand(self.batch, 1, s.n_kv_groups, s.heads_per_group, 3, generator=generator)

    def run(self, backend: str, device: torch.device) -> Results:
        """The output and the chosen blocks of every step."""
        view = self._cache(device)
        decoder: TokenDecoder = self._maker(backend)(
            view, heads_per_group=self.shape.heads_per_group, means=False, geometry=self.geometry, scale=self.scale
        )
        results: Results = {}
        for step, q in enumerate(self.q_steps, start=1):
            self._append(view, decoder, step)
            out, idx = decoder.attend(q.to(device), self._gates(device))
            results |= {f"out, step {step}": out.clone(), f"blocks, step {step}": idx.clone()}
        return results

    def compare(self, got: Results, device: torch.device) -> list[CheckResult]:
        results = []
        for step, q in enumerate(self.q_steps, start=1):
            idx = got[f"blocks, step {step}"].cpu()
            want = self._mixed(step, idx, torch.float32, CPU)
            plain = relative_rms(self._mixed(step, idx, self.dtype, device), want)
            error = relative_rms(got[f"out, step {step}"], want)
            results.append(bounded(f"{self.name} out, step {step}", error, tolerance(self.dtype, plain)))
            pos = self._chosen_from(step)
            worst = blocks_error(q, self.compressed.k, pos, torch.zeros_like(pos), idx, self.geometry, self.scale)
            results.append(bounded(f"{self.name} blocks, step {step}", float(worst.max()), SELECTION_LIMIT))
        return results

    def _position(self, step: int) -> Tensor:
        return torch.tensor(self.lengths)[:, None] + step - 1

    def _chosen_from(self, step: int) -> Tensor:
        """The last position of which the step's blocks are chosen."""
        return self._position(step)

    def _maker(self, backend: str) -> Callable[..., TokenDecoder]:
        make = BACKENDS[backend].decoder
        assert make is not None
        return make

    def _gates(self, device: torch.device) -> Tensor | None:
        return self.gates.to(device)

    def _mixed(self, step: int, idx: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Compute by the reference in fp32, or in another dtype by PyTorch's operators over the keys that it sees."""
        pos, sizes = self._position(step), dict[str, Any](geometry=self.geometry, scale=self.scale)
        zero, q = torch.zeros_like(pos), self.q_steps[step - 1]
        outs = []
        for name in ("compressed", "selected", "sliding"):
            k, v = {"compressed": self.compressed, "selected": self.selected, "sliding": self.window}[name]
            chosen = (idx,) if name == "selected" else ()

            def attend(q: Tensor, k: Tensor, v: Tensor, name: str = name, chosen: tuple[Tensor, ...] = chosen) -> Any:
                return getattr(REFERENCE, name)(q, k, v, *chosen, pos, zero, **sizes)

            if dtype == torch.float32:
                outs.append(attend(q.float(), k.float(), v.float()))
                continue
            visible = self._visible(name, step, k, *chosen, pos=pos)
            out, _ = plain_attention(q.to(device), k.to(device), v.to(device), visible.to(device), scale=self.scale)
            outs.append(out)
        return reference.mix(self.gates.to(device), *outs)

    def _visible(self, name: str, step: int, k: Tensor, *chosen: Tensor, pos: Tensor) -> Tensor:
        """Mask of the keys that the step's query sees in a branch, [B, 1, G, keys]."""
        q = torch.zeros_like(self.q_steps[step - 1][:, :, :, :1]).float()
        unit = torch.eye(k.shape[1])[None, :, None].expand(self.batch, -1, k.shape[2], -1)
        sizes = dict[str, Any](geometry=self.geometry, scale=self.scale)
        seen: Tensor = getattr(REFERENCE, name)(q, k.float(), unit, *chosen, pos, torch.zeros_like(pos), **sizes)
        return seen[:, :, :, 0] > 0

    def _window(self, selected: CachedKeys, row_B1: Tensor) -> CachedKeys:
        """A ring of the last w tokens of each row."""
        pos = torch.zeros_like(selected.pos_B1)
        return CachedKeys(self._pages(self.window, self.geometry.w, row_B1), pos, selected.start_B1)

    def _pages(self, stream: _Stream, states: int, table_BP: Tensor) -> KeyPages:
        """Empty pages of so many entries."""
        shape = (table_BP.numel(), self.shape.n_kv_groups, states)
        options = dict[str, Any](dtype=self.dtype, device=table_BP.device)
        k, v = (torch.full((*shape, x.shape[-1]), torch.nan, **options) for x in stream)
        return KeyPages(k, v, table_BP)

    def _cache(self, device: torch.device) -> CacheView:
        """Filled up to `lengths`."""
        g = self.geometry

        pos, zero = (torch.zeros(self.batch, 1, dtype=torch.int64, device=device) for _ in range(2))
        length, n_compressed = (torch.zeros(self.batch, dtype=torch.int64, device=device) for _ in range(2))
        row_B1 = torch.arange(self.batch, dtype=torch.int32, device=device)[:, None]
        n_pages = g.n_blocks(self.capacity)
        table_BP = torch.arange(self.batch * n_pages, dtype=torch.int32, device=device).flip(0).view(n_pages, -1).T
        table_BP = table_BP.contiguous()  # rows take turns, later tokens lie before earlier ones
        selected = CachedKeys(self._pages(self.selected, g.l_sel, table_BP), pos, zero)
        view = CacheView(
            self._pages(self.tail, g.l, row_B1),
            CachedKeys(self._pages(self.compressed, g.l_sel // g.d, table_BP), pos, zero + g.l // g.d - 1),
            selected,
            self._window(selected, row_B1),
            length,
            n_compressed,
        )
        for row, n in enumerate(self.lengths):
            length[row] = n
            n_compressed[row] = g.n_compressed(n)
            self._write(view, row, 0, n)
            for block in range(g.n_compressed(n)):
                self._emit(view, row, block)
        return view

    def _append(self, view: CacheView, decoder: TokenDecoder, step: int) -> None:
        """One token per row, by the decoder if it can, else as the cache does it."""
        g = self.geometry
        new = [length + step - 1 for length in self.lengths]
        if decoder.append is not None:
            at = torch.arange(self.batch), torch.tensor(new)
            streams = (self.tail, self.selected, self.window)
            tokens = tuple(x[at][:, None].to(view.length_B.device) for stream in streams for x in stream)
            decoder.append(tokens)
        for row, token in enumerate(new):
            if decoder.append is None:
                self._write(view, row, token, token + 1)
                view.length_B[row] = token + 1
                view.selected.pos_B1[row] = token  # the compressed branch's is the same tensor
                view.window.pos_B1[row] = min(token, view.window.pages.n_entries - 1)
            if g.n_compressed(token + 1) > g.n_compressed(token):
                self._emit(view, row, g.n_compressed(token))
                view.n_compressed_B[row] = g.n_compressed(token + 1)

    def _write(self, view: CacheView, row: int, begin: int, end: int) -> None:
        """Tokens from `begin` to `end`; a ring keeps the last ones."""
        pairs = ((view.tail, self.tail), (view.selected.pages, self.selected), (view.window.pages, self.window))
        for pages, stream in pairs:
            n = pages.n_entries
            tokens = torch.arange(max(begin, end - n), end)
            _put(pages, row, tokens % n, stream, tokens)

    def _emit(self, view: CacheView, row: int, block: int) -> None:
        entry = torch.tensor([int(view.compressed.start_B1[row]) + block])
        _put(view.compressed.pages, row, entry, self.compressed, torch.tensor([block]))


class MergedDecodeCase(DecodeCase):
    """A layer of kind `merged`: one set of keys and values, one softmax over window and blocks before it, no gates."""

    name = "merged decode"

    def __init__(self, case: KernelCase, dtype: torch.dtype) -> None:
        super().__init__(case, dtype)
        self.tail = self.window = self.selected
        self.compressed = _Stream(self.compressed.k, self.compressed.v[..., :0])

    def _maker(self, backend: str) -> Callable[..., TokenDecoder]:
        return partial(super()._maker(backend), merged=True)

    def _gates(self, device: torch.device) -> None:
        return None

    def _chosen_from(self, step: int) -> Tensor:
        return (self._position(step) - self.geometry.w).clamp(min=-1)

    def _window(self, selected: CachedKeys, row_B1: Tensor) -> CachedKeys:
        """Return the pages of all tokens, which hold the window, too."""
        return selected

    def _mixed(self, step: int, idx: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        k, v = self.selected
        blocks = self._visible("selected", step, k, idx, pos=self._chosen_from(step))
        visible = blocks | self._visible("sliding", step, k, pos=self._position(step))
        q, k, v = (x.to(device=device, dtype=dtype) for x in (self.q_steps[step - 1], k, v))
        out, _ = plain_attention(q, k, v, visible.to(device), scale=self.scale)
        return out


class StepCase:
    """Whole steps of a layer, from projections on: norm, rotation, append, φ and gates are in the decoder's kernels."""

    name = "decode step"

    def __init__(self, case: KernelCase, dtype: torch.dtype) -> None:
        s, g, self.dtype = case.shape, case.shape.geometry, dtype
        self.lengths, self.capacity = (g.l - 2, g.l - 2 + _BLOCKS * g.d), max(case.length, g.l + (_BLOCKS + 1) * g.d)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.layer = NSAAttention(
                _WIDTH, s.n_kv_groups * s.heads_per_group, s.n_kv_groups, s.d_k, s.d_v, *g.ints, kv="per_branch",
                phi="softmax", qk_norm=True, sliding_gate_init=0.0,
            ).requires_grad_(False)  # fmt: skip
            self.x = torch.randn(len(self.lengths), max(self.lengths) + DECODE_STEPS, _WIDTH)

    def run(self, backend: str, device: torch.device) -> Results:
        return self._outputs(backend, device, self.dtype)

    def compare(self, got: Results, device: torch.device) -> list[CheckResult]:
        want = self._outputs("reference", CPU, torch.float32)
        plain = self._outputs("portable", device, self.dtype)
        return [
            bounded(
                f"{self.name} {name}", relative_rms(got[name], exact),
                tolerance(self.dtype, relative_rms(plain[name], exact)),
            )
            for name, exact in want.items()
        ]  # fmt: skip

    def _outputs(self, backend: str, device: torch.device, dtype: torch.dtype) -> Results:
        layer, lengths = copy.deepcopy(self.layer).to(self.dtype).to(device, dtype), torch.tensor(self.lengths)
        layer.kernels = backend_request("portable")  # for the prompt
        x, cache = self.x.to(self.dtype), layer.new_cache(len(lengths), self.capacity)
        outs: Results = {}
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            prompt = x[:, : max(self.lengths)].to(device, dtype)
            layer(prompt, cache=cache, new_lens_B=lengths.to(device))
            layer.kernels = backend_request(backend)
            for step in range(DECODE_STEPS):
                token = x[torch.arange(len(lengths)), lengths + step][:, None]
                outs[f"out, step {step + 1}"] = layer(token.to(device, dtype), cache=cache)
        return outs


def _put(pages: KeyPages, row: int, entries: Tensor, stream: _Stream, tokens: Tensor) -> None:
    page, state = pages.table_BP[row].cpu()[entries // pages.k.shape[2]], entries % pages.k.shape[2]
    for slots, x in zip(pages[:2], stream, strict=True):
        slots[page.long().to(slots.device), :, state.to(slots.device)] = x[row, tokens].to(slots.device)
