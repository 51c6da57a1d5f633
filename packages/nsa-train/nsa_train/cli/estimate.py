"""`nsa estimate`: parameters, FLOPs, memory, time and price of a run."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from nsa.options import CHECKPOINTING, Checkpointing
from nsa_train.cli.config import resolve
from nsa_train.cli.early_checks import DATA_PACKAGES, require_packages
from nsa_train.cli.outputs import print_json, table_console

if TYPE_CHECKING:
    from nsa_train.planning.estimate import MemoryEstimate, RunEstimate

_AS_THEY_ARE = (
    "checkpoint_bytes", "kept_checkpoints", "tokens_per_step", "steps", "step_s", "timing", "tokens_per_s", "wall_s",
    "usd_per_hour", "usd", "backend",
)  # fmt: skip
"""Figures that `--json` prints under their own names."""
ARGUMENTS_HELP = "Config file or name of a shipped one (default: $CONFIG), then settings, e.g. train.seq_len=8192."
TARGET_HELP = "Hardware as NAME or NAME:COUNT, e.g. a100-80gb:2, or here:8 for eight ranks on this machine."
EFFICIENCY_HELP = "Share of the peak that all FLOPs reach, recomputation included, e.g. 0.4 (default: modelled)."
PRICE_HELP = "USD per GPU-hour (default: assumed)."


def estimate(
    arguments: list[str] = typer.Argument(None, metavar="CONFIG KEY=VALUE", help=ARGUMENTS_HELP),
    target: str = typer.Option("here", help=TARGET_HELP),
    efficiency: float = typer.Option(None, min=1e-6, max=1.0, help=EFFICIENCY_HELP),
    price: float = typer.Option(None, min=0.0, help=PRICE_HELP),
    allow: list[str] = typer.Option([], "--allow", metavar="RULE", help="Ignore this preflight rule; repeatable."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON, in bytes, seconds and USD."),
) -> None:
    """Estimate parameters, FLOPs, memory, time and price of a run.

    Weights, gradients and optimizer states are exact; activations are estimated tensor by tensor, within 15 % of
    measurements on a CPU. Time and price depend on the kernel backend and are modelled or assumed, which is printed
    with them, for the backend that will run and for the others; `--efficiency` replaces them. If
    `nsa preflight --no-dry-run` refuses the run, this command prints the estimate and exits with 2.

    **Examples:** `nsa estimate train_50k --target a100-80gb`,
    `nsa estimate train_50k train.seq_len=32768 parallel.data=fsdp --target h100-80gb:8 --efficiency 0.3`
    """
    config = resolve(arguments or [])
    require_packages(*DATA_PACKAGES)

    from nsa_train.planning.hardware import parse_target
    from nsa_train.planning.preflight_rules import DECIDED_AT_START, check_names, check_rules, failed, require_passed
    from nsa_train.train.gather_preflight_facts import gather

    check_names(allow)
    hardware = parse_target(target, config.runtime.device)
    facts = gather(config, hardware, efficiency=efficiency, price=price, try_it=False)
    verdicts = check_rules(facts, (*allow, *DECIDED_AT_START))
    if as_json:
        content = as_dict(facts.estimate) if facts.estimate is not None else {}
        print_json({**content, "refused_by": [verdict.rule for verdict in failed(verdicts)]})
    elif facts.estimate is not None:
        _print(facts.estimate)
    require_passed(verdicts)


def as_dict(figures: "RunEstimate") -> dict[str, Any]:
    parameters, memory = figures.parameters, figures.memory
    return {
        "target": str(figures.target),
        "vocab_size": figures.vocab_size,
        "parameters": {
            **vars(parameters),
            "attention_per_layer": dict(parameters.attention_per_layer),
            "total": parameters.total,
        },
        "flops_per_token": dict(figures.flops_per_token),
        "recomputed_flops_per_token": figures.recomputed_flops_per_token,
        "memory_bytes": {
            **memory_bytes(memory, memory.gradient_checkpointing),
            "activations_kept": memory.activations.kept,
            "activations_selective": memory.activations.selective,
            "activations_recomputed": memory.activations.recomputed,
            "kernel_workspace": memory.activations.workspace,
            "optimizer_step": memory.optimizer_step,
        },
        "gathered_over_needed": figures.padding,
        "cache_bytes_per_row": figures.cache_bytes,
        "step_s_is_measured": figures.measured,
        "mfu": figures.mfu(figures.tokens_per_s),
        **{name: getattr(figures, name) for name in _AS_THEY_ARE},
        "backends": [
            {
                "backend": one.backend,
                "step_s": one.step_s,
                "tokens_per_s": figures.tokens_per_step / one.step_s,
                "wall_s": figures.steps * one.step_s,
                "usd": figures.price_of(one.step_s),
                "memory_bytes": one.memory.total,
                "timing": one.timing,
            }
            for one in figures.backends
        ],
    }


def memory_bytes(memory: "MemoryEstimate", checkpointing: Checkpointing) -> dict[str, int]:
    """Memory of a device by its parts, with the activations of this kind of checkpointing."""
    parts = ("weights", "gradients", "optimizer", "communication", "reserve", "total", "available")
    return {name: getattr(memory, name) for name in parts} | {"activations": memory.activations.peak(checkpointing)}


def summary(figures: "RunEstimate") -> Iterator[tuple[str, str]]:
    """Memory, time and price, one line each."""
    memory = figures.memory
    yield "memory", f"{size(memory.total)} of {size(memory.available)} on each device"
    yield "time", f"{duration(figures.wall_s)} for {figures.steps:,} steps, {figures.tokens_per_s:,.0f} tokens/s"
    yield "", f"with the {figures.backend} backend: {figures.timing}"
    yield (
        "price",
        f"{figures.usd:,.2f} USD at {figures.usd_per_hour:.2f} per hour for {figures.target} (assumed unless given)",
    )


def size(n_bytes: float) -> str:
    """Text in GiB or MiB."""
    return f"{n_bytes / 2**30:.2f} GiB" if n_bytes >= 2**30 / 10 else f"{n_bytes / 2**20:.2f} MiB"


def duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} seconds"


def _print(figures: "RunEstimate") -> None:
    from rich.table import Table

    console = table_console(120)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(style="dim", overflow="fold")
    for part, figure, note in _rows(figures):
        table.add_row(part, figure, note)
    console.print(table)


def _rows(figures: "RunEstimate") -> Iterator[tuple[str, str, str]]:
    parameters, memory, flops = figures.parameters, figures.memory, figures.flops_per_token
    yield "target", str(figures.target), f"{memory.available / 2**30:.1f} GiB each; time and price below are for all"
    yield from (("", "", ""), ("parameters", f"{parameters.total:,}", "exact"))
    for part in ("embeddings", "attention", "feed_forward", "norms", "head"):
        yield f"  {part}", f"{getattr(parameters, part):,}", _share(getattr(parameters, part), parameters.total)
        if part == "attention":
            for kind, each in parameters.attention_per_layer.items():
                yield f"    {kind} layer", f"{each:,}", "each; model.attention"
    total = sum(flops.values())
    yield from (("", "", ""), ("MFLOP per token", f"{total / 1e6:,.1f}", "forward and backward"))
    for part, count in flops.items():
        yield f"  {part}", f"{count / 1e6:,.1f}", _share(count, total)
    if figures.recomputed_flops_per_token:
        part = " but the attention kernels" if memory.gradient_checkpointing == "selective" else ""
        note = f"in addition: gradient checkpointing runs the forward pass of the blocks{part} twice"
        yield "  recomputed", f"{figures.recomputed_flops_per_token / 1e6:,.1f}", note
    yield from (("", "", ""), ("memory per device", size(memory.total), "peak of a step"))
    yield "  weights", size(memory.weights), "exact; fp32"
    yield "  gradients", size(memory.gradients), "exact; fp32"
    yield "  optimizer", size(memory.optimizer), "exact; AdamW's two moments"
    chosen, activations = memory.gradient_checkpointing, memory.activations
    modes = (f"{size(activations.peak(mode))} {mode}" for mode in CHECKPOINTING if mode != chosen)
    yield "  activations", size(activations.peak(chosen)), f"gradient checkpointing {chosen}; {', '.join(modes)}"
    yield "    of which kernels", size(memory.activations.workspace), "at most; temporary"
    if memory.communication:
        note = f"between ranks; estimated, not measured; gathered weights are {figures.padding:.4f} of those needed"
        yield "  communication", size(memory.communication), note
    yield "  reserve", size(memory.reserve), "assumed: driver, fragmentation"
    yield from (("", "", ""), ("checkpoint", size(figures.checkpoint_bytes), "weights and optimizer, on disk"))
    note = f"{figures.kept_checkpoints} of them, by train.keep_checkpoints and train.keep_every"
    yield "  kept at the end", size(figures.kept_checkpoints * figures.checkpoint_bytes), note
    yield "cache", size(figures.cache_bytes), "KV cache of one row at inference"
    yield from (("", "", ""), ("tokens per step", f"{figures.tokens_per_step:,}", ""))
    yield "kernels", figures.backend, _why_this_backend(figures)
    yield "tokens per second", f"{figures.tokens_per_s:,.0f}", figures.timing
    yield "MFU", f"{figures.mfu(figures.tokens_per_s):.1%}", "model FLOPs, without recomputation, over the peak"
    yield (
        "time",
        duration(figures.wall_s),
        f"{figures.steps:,} steps, {figures.steps * figures.tokens_per_step / 1e6:,.0f} M tokens",
    )
    yield (
        "price",
        f"{figures.usd:,.2f} USD",
        f"at {figures.usd_per_hour:.2f} per hour for all devices, assumed unless given",
    )
    others = [one for one in figures.backends if one.backend != figures.backend]
    yield from [("", "", "")] * bool(others)
    for one in others:
        speed = f"{figures.tokens_per_step / one.step_s:,.0f} tokens/s"
        cost = (
            f"{duration(figures.steps * one.step_s)}, {figures.price_of(one.step_s):,.2f} USD, {size(one.memory.total)}"
        )
        yield f"with {one.backend}", speed, f"{cost}; {one.timing}"


def _why_this_backend(figures: "RunEstimate") -> str:
    """Explain what decides that this backend runs."""
    if figures.backend == "triton":
        return "kernels=auto takes it once it has passed its check on that GPU, which the start of a run decides"
    if figures.backend == "cpu":
        return "compiled C++; kernels=auto takes it where it can be compiled"
    return "requested, or the only backend that can run; the slowest of the branches"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}"
