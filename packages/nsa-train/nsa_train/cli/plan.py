"""`nsa plan`: layouts of a run on many GPUs, ranked by modelled tokens per second, and a step of the best executed."""

from typing import TYPE_CHECKING

import typer

from nsa_train.cli.config import resolve
from nsa_train.cli.estimate import ARGUMENTS_HELP, EFFICIENCY_HELP, PRICE_HELP
from nsa_train.cli.outputs import ProgressLine, print_json, table_console

if TYPE_CHECKING:
    from nsa_train.config.schema import RunConfig
    from nsa_train.planning.hardware import HardwareTarget
    from nsa_train.planning.layout_plan import LayoutFigures
    from nsa_train.planning.step_counts import StepCounts

_GPUS_HELP = "GPUs as NAME:COUNT, e.g. h100-80gb:1024."
_MTBF_HELP = "GPU-hours per failure (default: Llama 3's 419 interruptions in 54 days on 16,384 GPUs)."


def plan(
    arguments: list[str] = typer.Argument(None, metavar="CONFIG KEY=VALUE", help=ARGUMENTS_HELP),
    gpus: str = typer.Option(..., help=_GPUS_HELP),
    top: int = typer.Option(8, min=1, help="Layouts in the table."),
    execute: bool = typer.Option(False, "--execute", help="Run a step of the best layout on fake tensors."),
    all_layers: bool = typer.Option(False, "--all-layers", help="With --execute: all layers instead of a few."),
    efficiency: float = typer.Option(None, min=1e-6, max=1.0, help=EFFICIENCY_HELP),
    price: float = typer.Option(None, min=0.0, help=PRICE_HELP),
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

    **Examples:** `nsa plan configs/base_7b_128k.yaml --gpus h100-80gb:128`,
    `nsa plan configs/base_7b_1m.yaml --gpus h100-80gb:1024 --execute`
    """
    config = resolve(arguments or [])

    from nsa.errors import ConfigError
    from nsa_train.cli.plan_tables import as_dict, print_plan
    from nsa_train.planning.expected_goodput import LLAMA3_GPU_HOURS, FailureModel
    from nsa_train.planning.hardware import parse_target
    from nsa_train.planning.layout_plan import plan_layouts
    from nsa_train.train.datasets import vocabulary

    target = parse_target(gpus, config.runtime.device)
    failures = FailureModel(gpu_hours_per_failure or LLAMA3_GPU_HOURS, restart_s, storage_gb_s)
    vocab_size = config.model.vocab_size or vocabulary(config)
    with ProgressLine("comparing layouts") as line:
        comparison = plan_layouts(
            config, target, vocab_size, efficiency=efficiency, price=price, failures=failures, progress=line.update
        )
    counts = None
    if execute and comparison.ranked:
        counts = _execute(config, comparison.ranked[0], target, vocab_size, all_layers=all_layers)
    if as_json:
        print_json(as_dict(config, comparison, top, counts))
    else:
        console = table_console(120)
        print_plan(console, config, comparison, top, counts)
    if not comparison.ranked:
        raise ConfigError(
            f"no layout of this run fits {target}: the table says what each needs. Use more GPUs or larger ones, a "
            f"smaller model, or shorter rows (train.seq_len)."
        )


def _execute(
    config: "RunConfig", best: "LayoutFigures", target: "HardwareTarget", vocab_size: int, *, all_layers: bool
) -> "StepCounts":
    """A step of one rank in a process of its own."""
    from nsa_train.planning.hardware import RANKS_PER_NODE
    from nsa_train.train.simulation_process import SimulationRequest, simulate_in_child

    request = SimulationRequest(
        best.layout.applied(config).model_dump(mode="json"),
        vocab_size,
        target.count,
        min(target.count, RANKS_PER_NODE),
        all_layers=all_layers,
        kernel_workspace=best.memory.activations.workspace,
    )
    with ProgressLine("executing a step on fake tensors") as line:
        return simulate_in_child(request, lambda text: line.update(f"executing a step on fake tensors: {text}"))
