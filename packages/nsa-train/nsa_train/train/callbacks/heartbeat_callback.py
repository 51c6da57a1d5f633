"""Heartbeat callback: on log steps, appends loss, gradient norm, speed, memory and attention statistics as a record.

All values on the device are copied in one transfer. Between log steps that are far apart it appends "alive" records,
because monitors take a silent run for a stall.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nsa.core.nsa_attention import NSAAttention
from nsa.core.probe import Probe, attention_layers, probing
from nsa.kernels.choice_text import reason_text
from nsa.kernels.registry import BackendChoice
from nsa_train import names
from nsa_train.record.failure_codes import code_of_exception
from nsa_train.record.heartbeat_record import ALIVE_EVERY_S, METRICS, RECORD_FIELDS, HeartbeatRecord
from nsa_train.record.record_files import JsonLines
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine import Callback, PathOrStr
from nsa_train.train.host_collectives import HostCollectives


def kernel_choices(train_module: Any, device: torch.device) -> tuple[BackendChoice, ...]:
    """The backend of each branch and the reason, in the dtype that the attention of this train module computes in."""
    layers = attention_layers(train_module.model).values()
    layer: NSAAttention = max(layers, key=lambda layer: len(layer.branches))
    halved = train_module.autocast_precision or (train_module.dp_config and train_module.dp_config.param_dtype)
    return layer.plan(device, torch.bfloat16 if halved else torch.float32).choices


class _ForwardTimer:
    """Time of this rank's own forward passes, measured by hooks of the model; on a GPU by events, which do not block.

    Under ddp nothing in a forward pass waits for other ranks, so a slow rank shows.
    """

    def __init__(self) -> None:
        self._host_s = 0.0
        self._began = 0.0
        self._events: list[torch.cuda.Event] = []

    @contextmanager
    def on(self, model: nn.Module, device: torch.device) -> Iterator[None]:
        self._host_s, self._events = 0.0, []
        gpu = device.type == "cuda"
        hooks = [
            model.register_forward_pre_hook(lambda *_: self._mark() if gpu else self._start()),
            model.register_forward_hook(lambda *_: self._mark() if gpu else self._stop()),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def seconds(self) -> float:
        """Return the time of all forward passes since `on`; waits for the GPU to finish the last of them."""
        if not self._events:
            return self._host_s
        self._events[-1].synchronize()
        pairs = zip(self._events[::2], self._events[1::2], strict=True)
        return sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3

    def _start(self) -> None:
        self._began = time.perf_counter()

    def _stop(self) -> None:
        self._host_s += time.perf_counter() - self._began

    def _mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)


@dataclass
class HeartbeatCallback(Callback):
    """`emit` gets every record of this rank, for the metric writers and the progress line."""

    priority: ClassVar[int] = 10

    path: Path
    ranks: RankInfo
    collectives: HostCollectives
    log_every: int
    data: str
    synthetic: bool
    emit: Callable[[HeartbeatRecord], None]
    counts: Callable[[], dict[str, int]]
    """Number of skipped steps so far, by field name."""
    allowed: tuple[str, ...] = ()
    """Preflight rules that this run may break."""
    full_speed: float | None = None
    """Tokens per second at which all devices would reach their peak, for the MFU."""
    usd_per_s: float | None = None
    """Price of all devices."""
    _probes: dict[str, Probe] = field(default_factory=dict)
    _probing: ExitStack = field(default_factory=ExitStack)
    _fetch_began: float = 0.0
    _fetch_s: float = 0.0
    _since: float = 0.0
    _since_step: int = 0
    _first: bool = True
    _lines: JsonLines = field(init=False)
    _last_beat: float = 0.0
    _timer: _ForwardTimer = field(default_factory=_ForwardTimer)

    def __post_init__(self) -> None:
        self._lines = JsonLines(self.path)

    def beat(self, msg: str, **more: Any) -> None:
        self.beat_at(self.step, msg, **more)

    def beat_at(self, step: int, msg: str, **more: Any) -> None:
        """Append a record of that step."""
        always: dict[str, Any] = dict(
            rank=self.ranks.rank, data=self.data, synthetic=self.synthetic, allowed=self.allowed
        )
        beat = HeartbeatRecord.now(ts=time.time(), step=step, msg=msg, **always, **more)
        self._lines.append(beat.to_line())
        self._last_beat = time.monotonic()
        self.emit(beat)

    def stay_alive(self) -> None:
        """Called wherever the run makes progress; costs nothing while records are frequent."""
        if time.monotonic() - self._last_beat > ALIVE_EVERY_S:
            self.beat(names.ALIVE)

    def pre_train(self) -> None:
        self.beat(names.START)
        self._since, self._since_step = time.perf_counter(), self.step

    def post_checkpoint_loaded(self, path: PathOrStr) -> None:
        """Possibly in the middle of a step, on rollback: count and measure from here."""
        self._probing.close()
        self._since, self._since_step = time.perf_counter(), self.step

    def pre_load_batch(self) -> None:
        self._fetch_began = time.perf_counter()

    def pre_step(self, batch: dict[str, Any]) -> None:
        self._fetch_s = time.perf_counter() - self._fetch_began
        if not self.due():
            return
        model = self.trainer.train_module.model
        # A compiled step with statistics is another graph, which may round differently. Which steps have one must not
        # depend on where a run was stopped and resumed.
        if not (getattr(model, "compiled", False) and self.step % self.log_every):
            self._probes = self._probing.enter_context(probing(model))
        self._probing.enter_context(self._timer.on(model, self.trainer.device))

    def post_train_batch(self) -> None:
        self._probing.close()
        probes, self._probes = self._probes, {}
        if not self.due():
            self.stay_alive()
            return
        now = time.perf_counter()
        values = self._values(list(probes.values()))
        elapsed, steps = now - self._since, self.step - self._since_step
        toks_per_s = steps * self.trainer.tokens_per_batch / elapsed
        self.beat(
            names.PROGRESS,
            **values,
            toks_per_s=toks_per_s,
            mfu=None if self.full_speed is None else toks_per_s / self.full_speed,
            tokens_per_usd=None if self.usd_per_s is None else toks_per_s / self.usd_per_s,
            step_s=elapsed / max(1, steps),
            forward_s=self._timer.seconds(),
            dt_fetch_s=self._fetch_s,
            lr=float(self.trainer.train_module.optim.param_groups[0]["lr"]),
            tokens_seen=self.trainer.global_train_tokens_seen,
            **self.counts(),
            **self._memory(),
            **self._kernels(),
        )
        self._first = False
        self._since, self._since_step = time.perf_counter(), self.step

    def on_error(self, exc: BaseException) -> None:
        self._probing.close()
        self.beat(names.FAILED, detail=f"{type(exc).__name__}: {exc}", failure_code=code_of_exception(exc))

    def log_done(self) -> None:
        """Append the last record, after the final save, when the engine has closed its callbacks."""
        self._lines = JsonLines(self.path)
        self.beat(names.DONE)
        self.close()

    def close(self) -> None:
        self._lines.close()

    def due(self) -> bool:
        """The first step of a process is always logged: it shows that data, kernels and ranks work."""
        return self._first or self.step % self.log_every == 0 or self.step == self.trainer.max_steps

    def _values(self, probes: list[Probe]) -> dict[str, Any]:
        """Loss, gradient norm and probes, copied from the device in one transfer; the loss is averaged over ranks."""
        tensors = {
            "loss": self.trainer.train_module.step_loss,
            "grad_norm": self.trainer.train_module.step_grad_norm,
            **_over_layers(probes),
        }
        present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        device = self.trainer.device
        flat = torch.cat([tensor.detach().to(device, torch.float64).flatten() for tensor in present.values()]).tolist()
        values: dict[str, Any] = {}
        for name, tensor in present.items():
            numbers, flat = flat[: tensor.numel()], flat[tensor.numel() :]
            if tensor.dim() == 2:
                width = tensor.shape[1]
                values[name] = tuple(tuple(numbers[i : i + width]) for i in range(0, len(numbers), width))
            else:
                values[name] = tuple(numbers) if tensor.dim() else _number(name, numbers[0])
        if "loss" in values:
            values["loss"] = self.collectives.means([values["loss"]])[0]
        return values

    def _memory(self) -> dict[str, float]:
        on_gpu = self.trainer.device.type == "cuda"
        alloc = torch.cuda.memory_allocated(self.trainer.device) if on_gpu else 0
        reserved = torch.cuda.memory_reserved(self.trainer.device) if on_gpu else 0
        return {
            "host_mem_rss": _resident_mib(),
            "gpu_mem_alloc": mib(alloc),
            "gpu_mem_reserved": mib(reserved),
        }

    def _kernels(self) -> dict[str, Any]:
        """The backend of each branch and why."""
        choices = kernel_choices(self.trainer.train_module, self.trainer.device)
        chosen: dict[str, Any] = {f"kernel_{choice.branch}": choice.backend for choice in choices}
        chosen["kernels_reason"] = reason_text(choices)
        return chosen


def mib(n_bytes: int) -> float:
    return round(n_bytes / 2**20, 3)


def _resident_mib() -> float:
    """Resident memory of this process; 0 where /proc is missing."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return mib(pages * os.sysconf("SC_PAGE_SIZE"))


def _number(name: str, value: float) -> float:
    return int(value) if METRICS[name].type == int | None else value


def _over_layers(probes: list[Probe]) -> dict[str, Tensor]:
    """Combine the figures of the probed layers that have them, as the table of fields says."""
    combined = {}
    for name in dict.fromkeys(name for probe in probes for name in probe.figures if name in RECORD_FIELDS):
        stacked = torch.stack([probe.figures[name].double() for probe in probes if name in probe.figures])
        combined[name] = _REDUCTIONS[RECORD_FIELDS[name].over_layers](stacked)
        if name == "gate_branch_shares":
            combined["gate_shares_by_layer"] = stacked
    return combined


_REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda layers: layers.mean(0),
    "max": lambda layers: layers.amax(0),
    "sum": lambda layers: layers.sum(0),
}
