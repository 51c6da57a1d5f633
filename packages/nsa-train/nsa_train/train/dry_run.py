"""Dry run: one batch of the data, the model, one training step, and one checkpoint written and read back.

On the hardware of the run, the step is real and timed. For hardware that is not here it runs with fake tensors, which
have shapes and dtypes and no values: this finds shapes that do not match, but not a lack of memory. No file remains.

As a program (`nsa.child_process`) it is the child of `nsa_train.train.gather_preflight_facts`.
"""

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from nsa.child_process import answer_parent
from nsa.errors import NSAError
from nsa.files import scratch_folder
from nsa_train.checkpoint.folder import CheckpointFolder
from nsa_train.checkpoint.load import open_checkpoint, read_model
from nsa_train.checkpoint.run_state import RunRecord
from nsa_train.config.schema import RunConfig
from nsa_train.data.prefetcher import BatchPrefetcher, PrefetchSettings
from nsa_train.names import CHECKPOINTS, step_name
from nsa_train.planning.hardware import GIB, HardwareDevice, HardwareTarget
from nsa_train.planning.preflight_facts import DryRun, DryRunAttempt
from nsa_train.train import datasets
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine.build import build_train_module, choose_device
from nsa_train.train.engine.checkpointer import make_checkpointer, signing_key
from nsa_train.train.engine.data_loader import Tensors, to_engine
from nsa_train.train.engine.engine_log import quiet_engine_log
from nsa_train.train.engine.simulated_rank import fake_train_module
from nsa_train.train.engine.train_module import StepSkippingTrainModule

_Log = Callable[[str], None]
_OnDone = Callable[[str, DryRunAttempt], None]

# A step can fail by any of these; torch reports memory, shapes and devices by RuntimeError.
_FAILURES = (NSAError, RuntimeError, ValueError, TypeError, NotImplementedError, OSError, MemoryError)
_REPEAT_BELOW_S = 30.0


def dry_run(
    config: RunConfig,
    vocab_size: int,
    target: HardwareTarget,
    *,
    fetch_remote: bool,
    log: _Log,
    done: _OnDone = lambda part, attempt: None,
    no_data: str | None = None,
    no_real_step: str | None = None,
) -> DryRun:
    """Try one batch, the model, one step and one checkpoint.

    `fetch_remote`: also try data on another machine. Progress messages go to `log`, each attempt but the last to
    `done` as soon as it is known. `no_data`, `no_real_step`: why no batch is fetched, why the step uses fake tensors.
    """
    log("fetching a batch")
    shares = target.data_ranks(config.parallel.ranks_per_row)
    if no_data is not None:
        data, batch = DryRunAttempt(not_tried=no_data), None
    else:
        data, batch = _try_data(config, vocab_size, shares, fetch_remote)
    done("data", data)
    if reason := no_real_step or _why_not_here(config, target):
        log("one step with fake tensors")
        model, step = _try_fake(config, vocab_size, shares)
        return DryRun(data, model, step, DryRunAttempt(not_tried=f"{reason}: the run writes its first one itself"))
    log("building the model")
    with quiet_engine_log():
        return _try_here(config, vocab_size, shares, data, batch, log, done)


def _why_not_here(config: RunConfig, target: HardwareTarget) -> str | None:
    """One process can stand for one rank of ddp; with sharding, the whole model may be too large for one."""
    if not target.here:
        return f"{target} is not here"
    if target.count > 1 and config.parallel.data != "ddp":
        return f"parallel.data={config.parallel.data} shards the model over {target.count} ranks, and this is one"
    if config.parallel.ranks_per_row > 1:
        return f"parallel.tp and parallel.cp divide a row among {config.parallel.ranks_per_row} ranks, and this is one"
    return None


def _try_here(
    config: RunConfig, vocab_size: int, world: int, data: DryRunAttempt, batch: Tensors | None, log: _Log, done: _OnDone
) -> DryRun:
    try:
        device = choose_device(config, RankInfo())
        share = _share_of_one(config, world)
        module = build_train_module(share, vocab_size, RankInfo(), device)
    except _FAILURES as error:
        no_model = DryRunAttempt(not_tried="there is no model")
        return DryRun(data, DryRunAttempt(problem=_describe(error)), no_model, no_model)
    model = DryRunAttempt(seen=f"{module.model.num_params:,} parameters on {device}")
    done("model", model)
    log("one step")
    random_tokens = "" if batch is not None else ", on random tokens"
    batch = batch or _random_batch(share, vocab_size)
    try:
        step_s, peak = _step(module, share, batch)
    except _FAILURES as error:
        no_step = DryRunAttempt(not_tried="there was no step")
        return DryRun(data, model, DryRunAttempt(problem=_describe(error)), no_step)
    step = DryRunAttempt(seen=f"{step_s:.3g} s a step{peak}{random_tokens}")
    done("step", step)
    log("one checkpoint")
    return DryRun(data, model, step, _try_checkpoint(config, module), step_s)


def _share_of_one(config: RunConfig, world: int) -> RunConfig:
    """The config of one rank's share of the batch."""
    rows_of_one = max(1, config.train.batch_size // world)
    return config.model_copy(update={"train": config.train.model_copy(update={"batch_size": rows_of_one})})


def _try_data(
    config: RunConfig, vocab_size: int, world: int, fetch_remote: bool
) -> tuple[DryRunAttempt, Tensors | None]:
    if not fetch_remote and (place := datasets.remote_address(config)):
        return DryRunAttempt(not_tried=f"{place} is on another machine; --fetch tries it"), None
    data, began = config.data, time.monotonic()
    settings = PrefetchSettings(queue_depth=1, timeout_s=data.loader_timeout_s)
    try:
        wanted = datasets.training_rows(config, vocab_size)
        with BatchPrefetcher(
            wanted, global_rows=config.train.global_rows, world=world, settings=settings
        ) as prefetcher:
            prefetcher.warm_up()
            batch = next(prefetcher)
    except _FAILURES as error:
        return DryRunAttempt(problem=_describe(error)), None
    seen = f"{wanted}: the first batch came after {time.monotonic() - began:.1f} s"
    return DryRunAttempt(seen=seen), to_engine(batch)


def _random_batch(config: RunConfig, vocab_size: int) -> Tensors:
    generator = torch.Generator().manual_seed(config.train.seed)
    shape = (config.train.batch_size, config.train.seq_len)
    tokens = torch.randint(min(vocab_size, config.model.vocab_size or vocab_size), shape, generator=generator)
    return {"input_ids": tokens, "labels": tokens.roll(-1, 1)}


def _step(module: StepSkippingTrainModule, config: RunConfig, batch: Tensors) -> tuple[float, str]:
    """Seconds of one optimizer step, and the peak GPU memory as text. Raises if loss or norm is not finite."""
    device, on_gpu = module.device, module.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    share = {name: value[: config.train.batch_size] for name, value in batch.items()}
    loss, pass_s = _timed(lambda: module.forward_backward(share), on_gpu)
    if pass_s < _REPEAT_BELOW_S:  # the first one also compiles and warms up
        loss, pass_s = _timed(lambda: module.forward_backward(share), on_gpu)
    norm = float(module.clip_gradients(config.train.grad_clip or float("inf")))
    _, optimizer_s = _timed(module.optim.step, on_gpu)
    module.zero_grads()
    if not math.isfinite(loss) or not math.isfinite(norm):
        raise RuntimeError(f"the first step is not finite: loss {loss}, gradient norm {norm}")
    peak = f", {torch.cuda.max_memory_allocated(device) / GIB:.1f} GiB" if on_gpu else ""
    return config.train.accumulate_grad_batches * pass_s + optimizer_s, peak


def _timed(act: Callable[[], Any], on_gpu: bool) -> tuple[Any, float]:
    began = time.perf_counter()
    result = act()
    if on_gpu:
        torch.cuda.synchronize()
    return result, time.perf_counter() - began


def _try_checkpoint(config: RunConfig, module: StepSkippingTrainModule) -> DryRunAttempt:
    began = time.monotonic()
    try:
        with scratch_folder(Path(config.train.out_dir)) as scratch:
            checkpoints, key = scratch / CHECKPOINTS, signing_key(config)
            record = RunRecord(step=1, world_size=1, config=config.model_dump(mode="json"), data_cursor={})
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about the missing process group
                make_checkpointer(config, scratch, lambda: record).save(checkpoints / step_name(1), module, {})
            checkpoint = CheckpointFolder(checkpoints, key=key).find_resumable()
            if checkpoint.path is None:
                problem = "; ".join(str(finding) for finding in checkpoint.passed_over)
                return DryRunAttempt(problem=f"a checkpoint written to {scratch.parent} does not read back: {problem}")
            read = read_model(open_checkpoint(checkpoint.path, key=key))
            size = sum(path.stat().st_size for path in checkpoint.path.rglob("*") if path.is_file())
            weights = {name: value.detach().cpu().flatten() for name, value in module.model.state_dict().items()}
            wrong = [name for name, value in weights.items() if not torch.equal(read[name].flatten(), value)]
    except _FAILURES as error:
        return DryRunAttempt(problem=_describe(error))
    if wrong:
        return DryRunAttempt(problem=f"{len(wrong)} tensors read back differently, {wrong[0]} first: suspect the disk")
    return DryRunAttempt(
        seen=f"{size / GIB:.2f} GiB written, read back and compared in {time.monotonic() - began:.1f} s"
    )


def _try_fake(config: RunConfig, vocab_size: int, world: int) -> tuple[DryRunAttempt, DryRunAttempt]:
    """A step of one rank's share with fake tensors."""
    share = _share_of_one(config, world)
    try:
        module, mode = fake_train_module(share, vocab_size, RankInfo())
    except _FAILURES as error:
        return DryRunAttempt(problem=_describe(error)), DryRunAttempt(not_tried="there is no model")
    built = DryRunAttempt(seen=f"{module.model.num_params:,} parameters, as fake tensors")
    try:
        with mode:
            module.step_without_trainer([_random_batch(share, vocab_size)], share.train.grad_clip or float("inf"))
    except _FAILURES as error:
        return built, DryRunAttempt(problem=_describe(error))
    return built, DryRunAttempt(seen="shapes only, with fake tensors: time and memory were not measured")


def _describe(error: BaseException) -> str:
    """One line, with the exception type, which says more than some messages."""
    text = " ".join(str(error).split())
    return text if isinstance(error, NSAError) else f"{type(error).__name__}: {text[:300]}"


def _answer(
    send: Callable[..., None], config: dict[str, Any], vocab_size: int, target: dict[str, Any], **options: Any
) -> None:
    """Answer in the child: run with arguments in plain values, and send what is known of each part at once."""
    Path("/proc/self/oom_score_adj").write_text("1000")  # the first victim if the machine's memory runs out
    tried = dry_run(
        RunConfig.model_validate(config),
        vocab_size,
        HardwareTarget(**{**target, "device": HardwareDevice(**target["device"])}),
        log=lambda text: send(log=text),
        done=lambda part, attempt: send(attempts={part: asdict(attempt)}),
        **options,
    )
    attempts = asdict(tried)
    send(step_s=attempts.pop("step_s"), attempts=attempts)


if __name__ == "__main__":
    answer_parent(_answer)
