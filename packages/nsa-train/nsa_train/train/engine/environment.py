"""Process environment of a rank: process groups, seeds, logging and default device, as the engine sets them up."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from olmo_core import utils as engine_utils
from olmo_core.distributed.utils import broadcast_object
from olmo_core.train import prepare_training_environment, teardown_training_environment

from nsa.errors import NSAError
from nsa_train.config.schema import RunConfig
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine.build import compiles
from nsa_train.train.engine.engine_log import logging_restored, quiet_engine_log, without_announcements
from nsa_train.train.signal_handlers import enable_flight_recorder


@contextmanager
def training_environment(config: RunConfig, ranks: RankInfo, device: torch.device) -> Iterator[None]:
    """Set up process groups, seeds and logging for one run; tear them down at the end."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # Before the engine configures logging: it would put its handler on everything.
    with logging_restored(), quiet_engine_log():
        enable_flight_recorder()
        with without_announcements(), _stream_patch(compiles(config, device)):
            prepare_training_environment(
                seed=config.train.seed,
                backend=backend if ranks.distributed else None,
                timeout=timedelta(seconds=config.parallel.timeout_s),
                shared_filesystem=True,
            )
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        warnings.filterwarnings("ignore", "Slicing a flattened dim from root mesh")  # the engine's, with cp
        # The engine sets a default device, which puts a Python hook into every torch call.
        torch.set_default_device(None)
        try:
            yield
        finally:
            teardown_training_environment()


@contextmanager
def _stream_patch(wanted: bool) -> Iterator[None]:
    """Let the engine mend operators of compiled graphs only where something is compiled: it imports torch's compiler
    for it."""
    engines = engine_utils.patch_torch_stream_custom_ops
    if not wanted:
        engine_utils.patch_torch_stream_custom_ops = lambda: None
    try:
        yield
    finally:
        engine_utils.patch_torch_stream_custom_ops = engines


def on_first_rank(ranks: RankInfo, act: Callable[[], Any]) -> Any:
    """Call `act` on rank 0; return its result, or raise its `NSAError`, on all ranks."""
    answer: tuple[Any, NSAError | None] = (None, None)
    if ranks.first:
        try:
            answer = (act(), None)
        except NSAError as error:
            answer = (None, error)
    value, refusal = broadcast_object(answer)
    if refusal is not None:
        raise refusal
    return value
