"""Command-line options of the commands that load a model, and the loading itself with its progress line."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from nsa.errors import ConfigError
from nsa_train.cli.early_checks import MODEL_PACKAGES, find_model, require_device, require_packages, require_tokenizer
from nsa_train.cli.outputs import ProgressLine, print_error, print_rejected
from nsa_train.shipped import PRETRAINED as PRETRAINED_MODEL

if TYPE_CHECKING:
    from nsa_train.infer.load_model import LoadedModel


def _model_or_pretrained(context: typer.Context, path: Path | None) -> Path | None:
    if context.params.get("pretrained"):
        if path is not None:
            raise ConfigError(f"{path} and --pretrained both name a model. Leave one of them out.")
        return PRETRAINED_MODEL
    if path is None and not context.resilient_parsing:
        raise ConfigError("no model was given. Name a run folder, a checkpoint or an exported folder, or --pretrained.")
    return find_model(path)


MODEL = typer.Argument(
    None,
    metavar="MODEL",
    callback=_model_or_pretrained,
    help="A run folder, a checkpoint in it, or a folder written by `nsa export hf`.",
)
PRETRAINED = typer.Option(
    False,
    "--pretrained",
    is_eager=True,  # before MODEL
    help="Instead of MODEL: the small model of simple stories that comes with nsa-train.",
)
DEVICE = typer.Option(
    None, "--device", callback=require_device, help="cpu, cuda or cuda:N (default: a GPU if there is one)."
)
DTYPE = typer.Option(None, "--dtype", help="fp32, bf16 or fp16 (default: as the weights were saved).")
TOKENIZER = typer.Option(
    None,
    "--tokenizer",
    callback=require_tokenizer,
    help="byte, or a tokenizer.json; only for checkpoints that were saved without their tokenizer.",
)
KEY = typer.Option(None, "--key-file", help="File with the key that signs the checkpoints.")


def model_name(path: Path) -> str:
    """What a message calls a model: its path, and `pretrained` for the one of the package, whose path nobody typed."""
    return "pretrained" if path == PRETRAINED_MODEL else str(path)


def open_model(
    path: Path,
    *,
    device: str | None,
    dtype: str | None,
    tokenizer: str | None,
    key_file: Path | None,
    needs_text: bool = True,
) -> "LoadedModel":
    """Verify and load a model; a line on stderr says so if it takes a while."""
    require_packages(*MODEL_PACKAGES)
    with ProgressLine(f"loading {model_name(path)}"):
        from nsa_train.checkpoint.manifest import read_key
        from nsa_train.infer.generate import silence_transformers
        from nsa_train.infer.load_model import load_model

        silence_transformers()
        with _no_compilation() if path == PRETRAINED_MODEL and device in (None, "cpu") else nullcontext():
            return load_model(
                path,
                device=device,
                dtype=dtype,
                tokenizer=tokenizer,
                key=read_key(key_file),
                on_rejected=print_rejected,
                needs_text=needs_text,
            )


def _no_compilation() -> AbstractContextManager[None]:
    """Portable kernels for a model built within, where those of the CPU would be compiled first, for half a minute."""
    import torch

    from nsa.kernel_variables import requested, requested_backends
    from nsa.kernels.cpu.build import is_built
    from nsa.kernels.registry import BRANCHES

    if torch.cuda.is_available() or is_built() or requested_backends(BRANCHES):
        return nullcontext()
    print_error("note: portable kernels, as those of the CPU are not compiled yet; nsa doctor --prove compiles them.")
    return requested("portable")


def open_reference(path: Path, loaded: "LoadedModel", *, key_file: Path | None) -> "LoadedModel":
    """Load a model to compare `loaded` with, on its device and in its type."""
    with ProgressLine(f"loading {path}"):
        from nsa_train.checkpoint.manifest import read_key
        from nsa_train.infer.load_model import load_reference

        return load_reference(
            path,
            device=loaded.model.device,
            dtype=loaded.model.dtype,
            key=read_key(key_file),
            on_rejected=print_rejected,
        )
