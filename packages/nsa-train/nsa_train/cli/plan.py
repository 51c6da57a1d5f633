"""`nsa plan`: layouts of a run on many GPUs, ranked by modelled tokens per second, and a step of the best executed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from nsa.errors import ConfigError, NSAError
from nsa.options import SELECTING_KINDS
from nsa_train.cli.config import resolve
from nsa_train.cli.early_checks import DATA_PACKAGES, require_packages
from nsa_train.cli.estimate import ARGUMENTS_HELP, EFFICIENCY_HELP, PRICE_HELP, duration, memory_bytes, size
from nsa_train.cli.outputs import ProgressLine, print_json, table_console

if TYPE_CHECKING:
    from rich.console import Console

    from nsa_train.config.schema import RunConfig
    from nsa_train.planning.collective_bytes import StepCounts
    from nsa_train.planning.estimate import MemoryEstimate
    from nsa_train.planning.hardware import HardwareTarget
    from nsa_train.planning.layout_plan import LayoutFigures, LayoutPlan

_AS_THEY_ARE = ("compute_s", "overlapped_s", "exposed_s", "step_s", "tokens_per_s", "wall_s", "usd")
"""Figures of a layout that `--json` prints under their own names."""
_GPUS_HELP = "GPUs as NAME:COUNT, e.g. h100-80gb:1024 (required)."
_MTBF_HELP = "GPU-hours per failure (default: Llama 3's 419 interruptions in 54 days on 16,384 GPUs)."


def plan(
    arguments: list[str] = typer.Argument(None, metavar="CONFIG KEY=VALUE", help=ARGUMENTS_HELP),
    gpus: str = typer.Option(None, help=_GPUS_HELP),
    top: int = typer.Option(8, min=1, help="Layouts in the table."),
    execute: bool = typer.Option(False, "--execute", help="Run a step of the best layout on fake tensors."),
    all_layers: bool = typer.Option(False, "--all-layers", help="With --execute: all layers instead of a few."),
    efficiency: float = typer.Option(None, min=1e-6, max=1.0, help=EFFICIENCY_HELP),
    price: float = typer.Option(None, min=0.0, help=PRICE_HELP),
    gpus_per_node: int = typer.Option(None, min=1, help="GPUs that fast links join (default: 8)."),
    node_gb_s: float = typer.Option(None, min=1e-3, help="GB/s that a GPU receives from its node (default: assumed)."),
    network_gb_s: float = typer.Option(
        None, min=1e-3, help="GB/s that a GPU receives from other nodes (default: assumed)."
    ),
    gpu_hours_per_failure: float = typer.Option(None, min=1.0, help=_MTBF_HELP),
    restart_s: float = typer.Option(600.0, min=0.0, help="Seconds from a failure to the next step."),
    storage_gb_s: float = typer.Option(2.0, min=1e-3, help="GB/s that one node writes to storage."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON, in bytes, seconds and USD."),
) -> None:
    """Rank the parallel layouts of a run on many GPUs: dp, tp, cp, micro-batch and activation checkpointing.

    Model, sequence length and global batch (train.batch_size times train.accumulate_grad_batches) come from the config.
    Each layout has its memory, the bytes of its collectives, its time, price and goodput under failures. Times are
    modelled and speeds of links are assumed; nothing was measured on a GPU. `--execute` builds the training engine's
    model as rank 0 of that world size on fake tensors, runs two steps and shows what they allocate, compute and send
    beside the estimate. Exits with 2 if no layout fits.

    **Examples:** `nsa plan base_7b_128k --gpus h100-80gb:128`,
    `nsa plan base_7b_1m --gpus h100-80gb:1024 --execute`,
    `nsa plan base_7b_128k --gpus b200:256 --gpus-per-node 64 --node-gb-s 900` (64 of the 72 GPUs of an NVL72)
    """
    if gpus is None:
        raise ConfigError(
            "--gpus was not given: the best layout depends on the GPU and on how many there are. Write e.g. --gpus "
            "h100-80gb:8."
        )
    config = resolve(arguments or [])
    require_packages(*DATA_PACKAGES)

    from nsa_train.planning.hardware import parse_target
    from nsa_train.planning.layout_plan import LLAMA3_GPU_HOURS, FailureModel, plan_layouts
    from nsa_train.train.datasets import vocabulary

    target = parse_target(gpus, config.runtime.device, option="--gpus")
    device = target.device
    device = replace(device, node_gb_s=node_gb_s or device.node_gb_s, network_gb_s=network_gb_s or device.network_gb_s)
    target = replace(target, device=device, ranks_per_node=gpus_per_node or target.ranks_per_node)
    failures = FailureModel(gpu_hours_per_failure or LLAMA3_GPU_HOURS, restart_s, storage_gb_s)
    vocab_size = config.model.vocab_size or vocabulary(config)
    with ProgressLine("comparing layouts") as line:
        comparison = plan_layouts(
            config, target, vocab_size, efficiency=efficiency, price=price, failures=failures, progress=line.update
        )
    counts = None
    if execute and comparison.ranked:
        best, doing = comparison.ranked[0], "executing a step on fake tensors"
        with ProgressLine(doing) as line:
            counts = simulate_in_child(
                best.layout.applied(config),
                vocab_size,
                target,
                lambda text: line.update(f"{doing}: {text}"),
                all_layers=all_layers,
                kernel_workspace=best.memory.activations.workspace,
            )
    if as_json:
        print_json(_as_dict(config, comparison, top, counts))
    else:
        console = table_console(120)
        print_plan(console, config, comparison, top, counts)
    if not comparison.ranked:
        raise ConfigError(
            f"no layout of this run fits {target}: the table says what each needs. Use more GPUs or larger ones, a "
            f"smaller model, or shorter rows (train.seq_len)."
        )


def simulate_in_child(
    config: "RunConfig",
    vocab_size: int,
    target: "HardwareTarget",
    log: Callable[[str], None] = lambda text: None,
    *,
    limit_s: float = 600.0,
    **options: Any,
) -> "StepCounts":
    """`simulate_step` of one of the target's ranks, in a process of its own."""
    from nsa.child_process import ChildFailed, ChildProcess
    from nsa_train.planning.collective_bytes import StepCounts

    with ChildProcess("the simulated step", ("-m", "nsa_train.train.engine.simulated_rank")) as child:
        ranks = dict(world=target.count, local_world=min(target.count, target.ranks_per_node))
        child.send(config=config.model_dump(mode="json"), vocab_size=vocab_size, **ranks, **options)
        answer: dict[str, Any] = {}
        try:
            for answer in child.messages(limit_s=limit_s):
                if "log" in answer:
                    log(answer["log"])
        except ChildFailed as error:
            raise NSAError(f"{error}. Simulate fewer layers.") from error
    if "refused" in answer:
        raise ConfigError(answer["refused"])
    return StepCounts.from_json(answer["counts"])


def print_plan(
    console: "Console", config: "RunConfig", plan: "LayoutPlan", top: int, counts: "StepCounts | None"
) -> None:
    train = config.train
    rows, device = train.global_rows, plan.target.device
    console.print(
        f"{plan.target}: {plan.figures.parameters.total / 1e9:.2f} billion parameters, rows of {train.seq_len:,} "
        f"tokens, global batch {rows:,} rows ({rows * train.seq_len:,} tokens)"
    )
    console.print(
        f"{plan.considered:,} layouts keep the rules; times are modelled, speeds of links assumed unless given: "
        f"{device.node_gb_s:.4g} GB/s in a node of {plan.target.ranks_per_node}, {device.network_gb_s:.3g} GB/s of "
        f"network per GPU\n"
    )
    if plan.ranked:
        _table(
            console,
            ("data", "tp", "cp", "rows", "passes", "checkpointing", "memory", "step", "time waited", "tokens/s", "lost",
             "price"),
            [_row(each) for each in plan.ranked[:top]],
        )  # fmt: skip
        _print_best(console, config, plan, counts)
    _print_left_out(console, plan)
    _print_branches(console, config, plan)


def _row(figures: "LayoutFigures") -> tuple[str, ...]:
    layout = figures.layout
    return (
        layout.name, f"{layout.tp}", f"{layout.cp}", f"{layout.rows}", f"{layout.passes}", layout.checkpointing,
        size(figures.memory.total), f"{figures.step_s:.3g} s", f"{figures.exposed_s / figures.step_s:.0%}",
        f"{figures.tokens_per_s:,.0f}", f"{figures.goodput.lost:.1%}", f"{figures.usd:,.0f} USD",
    )  # fmt: skip


def _print_best(console: "Console", config: "RunConfig", plan: "LayoutPlan", counts: "StepCounts | None") -> None:
    best = plan.ranked[0]
    console.print("\nSettings of the first, to add after the config:", style="bold")
    console.print("  " + " ".join(best.layout.overrides()), soft_wrap=True)
    console.print("\nMemory of a GPU", style="bold")
    _table(console, None, list(_memory_rows(best)))
    console.print("\nCollectives of a rank in a step", style="bold")
    _table(
        console,
        ("purpose", "collective", "ranks", "link", "calls", "received", "time"),
        [
            (
                each.use.purpose, each.use.group.kind, f"{each.use.group.size:,}",
                "node" if each.in_node else "network", f"{each.use.total.calls:,}", size(each.received_bytes),
                f"{1000 * each.seconds:,.1f} ms",
            )
            for each in best.traffic
        ],
    )  # fmt: skip
    console.print("\nTime, price and failures", style="bold")
    _table(console, None, list(_time_rows(best)))
    if counts is not None:
        _print_counts(console, config, plan, counts)


def _memory_rows(figures: "LayoutFigures") -> Iterator[tuple[str, str, str]]:
    memory, layout = figures.memory, figures.layout
    yield "weights, gradients, optimizer", size(_state_bytes(memory)), "rank 0's share"
    yield "activations", size(memory.activations.peak(layout.checkpointing)), f"checkpointing {layout.checkpointing}"
    yield "  of which kernels", size(memory.activations.workspace), "at most; temporary"
    yield "gathered weights and gradients", size(memory.communication), "a block in use and one ahead"
    yield (
        "gathered weights / needed",
        f"{figures.estimate.padding:.3f}",
        "fsdp pads a parameter with fewer rows than ranks",
    )
    yield "reserve", size(memory.reserve), "assumed: driver, fragmentation"
    yield "total", size(memory.total), f"of {size(memory.available)}"


def _state_bytes(memory: "MemoryEstimate") -> int:
    return memory.weights + memory.gradients + memory.optimizer


def _time_rows(figures: "LayoutFigures") -> Iterator[tuple[str, str, str]]:
    estimate, goodput = figures.estimate, figures.goodput
    yield "compute", f"{figures.compute_s:.3g} s", estimate.timing
    yield "communication behind it", f"{figures.overlapped_s:.3g} s", "weights and gradients, while blocks compute"
    yield "communication that waits", f"{figures.exposed_s:.3g} s", "tensor and context parallelism, and what is left"
    yield "step", f"{figures.step_s:.3g} s", f"{figures.tokens_per_s:,.0f} tokens/s"
    yield "MFU", f"{estimate.mfu(figures.tokens_per_s):.1%}", "model FLOPs, without recomputation, over the peak"
    yield "failure", f"every {duration(goodput.mtbf_s)}", "assumed, of all GPUs together"
    every = max(1, round(goodput.interval_s / figures.step_s))
    yield (
        "save",
        f"every {duration(goodput.interval_s)}",
        f"train.save_every={every}; stops {goodput.save_s:.3g} s (assumed)",
    )
    yield "lost", f"{goodput.lost:.1%}", "saving, steps done again, restarts (Young and Daly)"
    yield "run", duration(figures.wall_s), f"{estimate.steps:,} steps, with what is lost"
    tokens = estimate.steps * estimate.tokens_per_step
    yield "tokens per dollar", f"{tokens / figures.usd:,.0f}", "of the whole run, with what is lost"
    yield "price", f"{figures.usd:,.0f} USD", f"at {estimate.usd_per_hour:,.0f} per hour for all, assumed unless given"


def _print_counts(console: "Console", config: "RunConfig", plan: "LayoutPlan", counts: "StepCounts") -> None:
    from nsa_train.planning.layout_plan import compare_with_counts

    best = plan.ranked[0]
    divided = best.layout.applied(config)
    extended = f" (extended from up to {counts.extended_from})" if counts.extended_from else ""
    console.print(
        f"\nExecuted on fake tensors: rank 0 of {plan.target.count:,}, {counts.layers} layers{extended}, passes per "
        f"step: {counts.passes}",
        style="bold",
    )
    rows = []
    for each in compare_with_counts(divided, best, plan.figures, plan.target, counts):
        values = [size(v) if each.unit == "bytes" else f"{v / 1e12:,.1f} T" for v in (each.estimated, each.executed)]
        rows.append((each.name, *values, f"{each.difference:+.1%}" if each.estimated else "not estimated"))
    _table(console, ("of one rank", "estimated", "executed", "difference"), rows)


def _print_left_out(console: "Console", plan: "LayoutPlan") -> None:
    if plan.too_large:
        console.print("\nToo large in every layout", style="bold")
        rows = []
        for layout, memory in ((each.layout, each.memory) for each in plan.too_large):
            activations, states = memory.activations.peak(layout.checkpointing), _state_bytes(memory)
            parts = f"{size(activations)} activations, {size(states)} weights and states"
            rows.append((f"tp {layout.tp}, cp {layout.cp}", f"at least {size(memory.total)}", parts))
        _table(console, None, rows)
    if plan.impossible:
        console.print("\nExcluded by a rule", style="bold")
        reasons: dict[str, list[str]] = {}
        for each in plan.impossible:
            # Without the rule's fix, which does not apply to one of many layouts.
            reasons.setdefault(each.reason.partition(": ")[0], []).append(f"tp {each.tp} cp {each.cp}")
        for reason, splits in reasons.items():
            console.print(f"  {', '.join(splits)}: {reason}", soft_wrap=True)


def _print_branches(console: "Console", config: "RunConfig", plan: "LayoutPlan") -> None:
    if not {*SELECTING_KINDS} & {*config.model.attention}:
        return
    reads, flops = (sum(getattr(each, name) for each in plan.branches) for name in ("reads", "flops"))
    console.print(f"\nAttention branches at {config.train.seq_len:,} tokens", style="bold")
    _table(
        console,
        ("branch", "keys of the last query", "of a mean query", "share", "share of FLOPs"),
        [
            (
                each.branch, f"{each.reads_of_last:,}", f"{each.reads:,.0f}", f"{each.reads / reads:.1%}",
                f"{each.flops / flops:.1%}",
            )
            for each in plan.branches
        ],
    )  # fmt: skip


def _table(console: "Console", headers: Sequence[str] | None, rows: Sequence[Sequence[str]]) -> None:
    from rich.table import Table

    table = Table(box=None, show_header=headers is not None, pad_edge=False)
    for index in range(len(rows[0]) if rows else 0):
        text = index == 0 or (headers is None and index == 2)
        name = headers[index] if headers is not None else ""
        table.add_column(name, justify="left" if text else "right", no_wrap=not (headers is None and index == 2))
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _as_dict(config: "RunConfig", plan: "LayoutPlan", top: int, counts: "StepCounts | None") -> dict[str, Any]:
    from nsa_train.planning.layout_plan import compare_with_counts

    content: dict[str, Any] = {
        "target": str(plan.target),
        "parameters": plan.figures.parameters.total,
        "considered": plan.considered,
        "layouts": [_layout_dict(each) for each in plan.ranked[:top]],
        "too_large": [_layout_dict(each) for each in plan.too_large],
        "impossible": [vars(each) for each in plan.impossible],
        "branches": [vars(each) for each in plan.branches],
    }
    if counts is not None:
        best = plan.ranked[0]
        compared = compare_with_counts(best.layout.applied(config), best, plan.figures, plan.target, counts)
        content["executed"] = {
            **counts.as_json(),
            "compared": [{**vars(each), "difference": each.difference} for each in compared],
        }
    return content


def _layout_dict(figures: "LayoutFigures") -> dict[str, Any]:
    goodput = figures.goodput
    return {
        **vars(figures.layout),
        "overrides": figures.layout.overrides(),
        "fits": figures.fits,
        "memory_bytes": memory_bytes(figures.memory, figures.layout.checkpointing),
        "collectives": [
            {
                "purpose": each.use.purpose,
                **vars(each.use.group),
                **vars(each.use.total),
                "in_node": each.in_node,
                "received_bytes": each.received_bytes,
                "seconds": each.seconds,
            }
            for each in figures.traffic
        ],
        "gathered_over_needed": figures.estimate.padding,
        "mfu": figures.estimate.mfu(figures.tokens_per_s),
        **{name: getattr(figures, name) for name in _AS_THEY_ARE},
        "goodput": {**vars(goodput), "lost": goodput.lost},
    }
