"""Tables and JSON of `nsa plan`."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from nsa.options import SELECTING_KINDS
from nsa_train.cli.estimate import duration, size

if TYPE_CHECKING:
    from rich.console import Console

    from nsa_train.config.schema import RunConfig
    from nsa_train.planning.layout_plan import LayoutFigures, LayoutPlan
    from nsa_train.planning.step_counts import StepCounts


def print_plan(
    console: "Console", config: "RunConfig", plan: "LayoutPlan", top: int, counts: "StepCounts | None"
) -> None:
    train = config.train
    rows, device = train.batch_size * train.accumulate_grad_batches, plan.target.device
    console.print(
        f"{plan.target}: {plan.figures.parameters.total / 1e9:.2f} billion parameters, rows of {train.seq_len:,} "
        f"tokens, global batch {rows:,} rows ({rows * train.seq_len:,} tokens)"
    )
    console.print(
        f"{plan.considered:,} layouts keep the rules; times are modelled, speeds of links assumed: "
        f"{device.node_gb_s:.0f} GB/s in a node, {device.network_gb_s:.3g} GB/s of network per GPU\n"
    )
    if plan.ranked:
        _table(
            console,
            ("data", "tp", "cp", "rows", "passes", "checkpointing", "memory", "step", "of it waits", "tokens/s", "lost",
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
    console.print("\nThe first, to give after the config:", style="bold")
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
    yield "weights, gradients, optimizer", size(memory.weights + memory.gradients + memory.optimizer), "rank 0's share"
    yield "activations", size(memory.activations.peak(layout.checkpointing)), f"checkpointing {layout.checkpointing}"
    yield "  of it kernels", size(memory.activations.workspace), "at most; temporary"
    yield "gathered weights and gradients", size(memory.communication), "a block in use and one ahead"
    yield "reserve", size(memory.reserve), "assumed: driver, fragmentation"
    yield "total", size(memory.total), f"of {size(memory.available)}"


def _time_rows(figures: "LayoutFigures") -> Iterator[tuple[str, str, str]]:
    estimate, goodput = figures.estimate, figures.goodput
    yield "compute", f"{figures.compute_s:.3g} s", estimate.timing
    yield "communication behind it", f"{figures.overlapped_s:.3g} s", "weights and gradients, while blocks compute"
    yield "communication that waits", f"{figures.exposed_s:.3g} s", "tensor and context parallelism, and what is left"
    yield "step", f"{figures.step_s:.3g} s", f"{figures.tokens_per_s:,.0f} tokens/s"
    yield "failure", f"every {duration(goodput.mtbf_s)}", "assumed, of all GPUs together"
    every = max(1, round(goodput.interval_s / figures.step_s))
    yield (
        "save",
        f"every {duration(goodput.interval_s)}",
        f"train.save_every={every}; stops {goodput.save_s:.3g} s (assumed)",
    )
    yield "lost", f"{goodput.lost:.1%}", "saving, steps done again, restarts (Young and Daly)"
    yield "run", duration(figures.wall_s), f"{estimate.steps:,} steps, with what is lost"
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
        rows = [
            (
                f"tp {each.layout.tp}, cp {each.layout.cp}",
                f"at least {size(each.memory.total)}",
                f"{size(each.memory.activations.peak(each.layout.checkpointing))} activations, "
                f"{size(each.memory.weights + each.memory.gradients + each.memory.optimizer)} weights and states",
            )
            for each in plan.too_large
        ]
        _table(console, None, rows)
    if plan.impossible:
        console.print("\nExcluded by a rule", style="bold")
        reasons: dict[str, list[str]] = {}
        for each in plan.impossible:
            reasons.setdefault(_without_fix(each.reason), []).append(f"tp {each.tp} cp {each.cp}")
        for reason, splits in reasons.items():
            console.print(f"  {', '.join(splits)}: {reason}", soft_wrap=True)


def _without_fix(reason: str) -> str:
    """A rule's reason; its fix does not apply to one of many layouts."""
    return reason.partition(": ")[0]


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


def as_dict(config: "RunConfig", plan: "LayoutPlan", top: int, counts: "StepCounts | None") -> dict[str, Any]:
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
    memory, goodput = figures.memory, figures.goodput
    return {
        **vars(figures.layout),
        "overrides": figures.layout.overrides(),
        "fits": figures.fits,
        "memory_bytes": {
            "weights": memory.weights,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
            "activations": memory.activations.peak(figures.layout.checkpointing),
            "communication": memory.communication,
            "reserve": memory.reserve,
            "total": memory.total,
            "available": memory.available,
        },
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
        "compute_s": figures.compute_s,
        "overlapped_s": figures.overlapped_s,
        "exposed_s": figures.exposed_s,
        "step_s": figures.step_s,
        "tokens_per_s": figures.tokens_per_s,
        "goodput": {**vars(goodput), "lost": goodput.lost},
        "wall_s": figures.wall_s,
        "usd": figures.usd,
    }
