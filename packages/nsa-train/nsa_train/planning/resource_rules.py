"""Preflight rules about resources: speed of the kernels, memory of the device, room on the disk."""

from dataclasses import replace

from nsa.kernels.choice_text import kernels_text
from nsa_train.planning.estimate import MemoryEstimate
from nsa_train.planning.hardware import GIB
from nsa_train.planning.preflight_facts import PreflightFacts, RuleFinding, finding
from nsa_train.planning.step_time import BACKENDS
from nsa_train.run_model import wanted_kernels

SAFE_MEMORY = 0.9  # share of the memory that an estimate may fill


def fast_kernels(facts: PreflightFacts) -> RuleFinding:
    """Judges the backends that will run: as decided on this machine, else as the settings request them."""
    device, is_gpu = facts.target.device.name, facts.target.device.is_gpu
    fastest = BACKENDS[is_gpu][0]
    if facts.kernels_problem is not None:
        return RuleFinding(False, facts.kernels_problem, "Set kernels.*=auto, and unset NSA_KERNEL.")
    if facts.kernels is not None:
        slow = [choice.branch for choice in facts.kernels if choice.backend != fastest]
        what = f"kernels: {kernels_text(facts.kernels)}"
    else:
        requested = wanted_kernels(facts.config)._asdict()
        slow = [branch for branch, name in requested.items() if name not in ("auto", fastest)]
        what = ", ".join(f"kernels.{branch} is {requested[branch]}" for branch in slow)
        what += "" if facts.config.runtime.use_flash else " (runtime.use_flash is false)"
        if not slow:
            return RuleFinding(None, f"decided at the start, on {device}: {fastest} if it can run there, else portable")
    if not slow:
        return RuleFinding(True, what)
    fix = f"Set kernels.*=auto runtime.use_flash=true, and unset NSA_KERNEL: {fastest} is the fast backend on {device}."
    if facts.kernels is not None and not all(choice.requested for choice in facts.kernels):
        fix = "Correct what prevents it, as the message says" + ("; `nsa gpu-check` shows more." if is_gpu else ".")
    return RuleFinding(False, f"{what}: {_slower(facts, fastest)}", fix)


def _slower(facts: PreflightFacts, fastest: str) -> str:
    """How much slower the run's backend is than the fastest, in tokens/s."""
    if facts.estimate is None:
        return f"slower than {fastest}"
    tokens, backends = facts.estimate.tokens_per_step, {one.backend: one for one in facts.estimate.backends}
    slow = backends.get(facts.estimate.backend, facts.estimate.backends[-1])
    figures = [f"{tokens / one.step_s:,.0f} tokens/s with {one.backend}" for one in (slow, backends[fastest])]
    return f"about {figures[0]}, {figures[1]} ({slow.timing.partition(':')[0]}, not measured)"


def gradient_checkpointing(facts: PreflightFacts) -> RuleFinding:
    """Requires checkpointing unless there is room for what the estimate may be off by."""
    mode = facts.config.runtime.gradient_checkpointing
    setting = f"runtime.gradient_checkpointing is {mode}"
    if mode == "full":
        return RuleFinding(True, setting)
    if facts.estimate is None:
        return RuleFinding(None, "memory cannot be estimated without the vocabulary size")
    memory = facts.estimate.memory
    room = int(SAFE_MEMORY * memory.available)
    return finding(
        memory.total <= room,
        f"{setting}, about {memory.total / GIB:.1f} of {memory.available / GIB:.1f} GiB",
        f"a long run needs {1 - SAFE_MEMORY:.0%} of the memory free, because the estimate is not exact",
        _more_checkpointing(memory, room),
    )


def _more_checkpointing(memory: MemoryEstimate, room: int) -> str:
    """The least checkpointing that fits."""
    fits = replace(memory, gradient_checkpointing="selective").total <= room
    mode = "selective" if fits and memory.gradient_checkpointing == "off" else "full"
    return f"Set runtime.gradient_checkpointing={mode}."


def memory(facts: PreflightFacts) -> RuleFinding:
    if facts.estimate is None:
        return RuleFinding(None, "memory cannot be estimated without the vocabulary size")
    memory, config = facts.estimate.memory, facts.config
    what = f"about {memory.total / GIB:.1f} of {memory.available / GIB:.1f} GiB of {facts.target.device.name}"
    if memory.fits:
        return RuleFinding(True, what)
    if memory.weights + memory.gradients + memory.optimizer > memory.available:
        fix = "Shard with parallel.data=fsdp over more GPUs, or make the model smaller: model.dim, model.n_layers."
    elif config.runtime.gradient_checkpointing != "full":
        fix = _more_checkpointing(memory, memory.available)
    elif config.train.batch_size > (shares := facts.target.data_ranks(config.parallel.ranks_per_row)):
        half = max(shares, config.train.batch_size // 2)
        more = config.train.accumulate_grad_batches * config.train.batch_size // half
        fix = f"Set train.batch_size={half} train.accumulate_grad_batches={more}."
    else:
        fix = "Shard with parallel.data=fsdp over more GPUs, or shorten train.seq_len."
    return RuleFinding(False, f"{what}: the run would run out of memory", fix)


def disk(facts: PreflightFacts) -> RuleFinding:
    if facts.estimate is None:
        return RuleFinding(None, "the checkpoint size is unknown without the vocabulary size")
    if facts.folder.disk_free is None:
        return RuleFinding(None, f"the free space on the disk of {facts.folder.path} is unknown")
    keep = facts.estimate.kept_checkpoints
    there = min(keep, len(facts.folder.checkpoints))
    need = (keep + 1 - there) * facts.estimate.checkpoint_bytes + facts.estimate.export_bytes
    fits = need <= facts.folder.disk_free
    what = f"{need / GIB:.2f} GiB for {keep} + 1 checkpoints and the final model"
    if not facts.target.here:
        return RuleFinding(None, f"{what}: the disk of {facts.target} cannot be checked from this machine")
    what = f"{what}, {facts.folder.disk_free / GIB:.1f} GiB free"
    return RuleFinding(fits, what, "Free disk space, set train.out_dir to another disk, or keep fewer checkpoints.")
