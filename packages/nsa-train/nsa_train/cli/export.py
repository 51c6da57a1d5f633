"""`nsa export hf` and `nsa import hf`: checkpoints to folders that Transformers loads, and back."""

from pathlib import Path

import typer

from nsa_train.cli.model_options import KEY
from nsa_train.cli.outputs import print_line, print_rejected, require_writable_folder

export_app = typer.Typer(help="Export a checkpoint for other software.", no_args_is_help=True)
import_app = typer.Typer(help="Import a model of other software as a checkpoint.", no_args_is_help=True)


@export_app.callback()
def _export() -> None:
    """Export a checkpoint for other software."""


@import_app.callback()
def _import() -> None:
    """Import a model of other software as a checkpoint."""


@export_app.command("hf")
def export_hf(
    source: Path = typer.Argument(
        ..., metavar="RUN|CHECKPOINT", help="A run folder (newest good one), or a checkpoint."
    ),
    out: Path = typer.Argument(..., metavar="OUT", help="The folder to write; it must not exist or be empty."),
    dtype: str = typer.Option(None, "--dtype", help="fp32, bf16 or fp16; default: as saved, fp32 for a run."),
    license_name: str = typer.Option(None, "--license", help="Licence for the model card, e.g. apache-2.0."),
    tokenizer: str = typer.Option(
        None, "--tokenizer", help="byte or a tokenizer.json; only for checkpoints of earlier versions, which have none."
    ),
    remote_code: bool = typer.Option(
        False, "--remote-code", help="Add modelling code, for machines without this package (trust_remote_code=True)."
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an earlier export in OUT."),
    key_file: Path = KEY,
) -> None:
    """Write a verified checkpoint as a folder that Transformers loads: weights, config, tokenizer and model card.

    **Example:** `nsa export hf artifacts/run exported`
    """
    require_writable_folder(out.absolute().parent)

    from nsa_train.checkpoint.manifest import read_key
    from nsa_train.convert.export_folder import export_folder

    exported = export_folder(
        source,
        out,
        dtype=dtype,
        license_name=license_name,
        tokenizer=tokenizer,
        remote_code=remote_code,
        overwrite=overwrite,
        key=read_key(key_file),
        on_rejected=print_rejected,
    )
    print_line(f"wrote {out} from {exported.path.name}")


@import_app.command("hf")
def import_hf(
    folder: Path = typer.Argument(..., metavar="DIR", help="A folder that `nsa export hf` or Transformers wrote."),
    out: Path = typer.Argument(..., metavar="OUT", help="The run folder to write; it must not exist or be empty."),
    key_file: Path = KEY,
) -> None:
    """Write a folder in Transformers' format as a run folder with one checkpoint, for `nsa train --init-from OUT`.

    Only safetensors and JSON are read, and nothing in the folder is executed.

    **Example:** `nsa import hf exported artifacts/imported`
    """
    require_writable_folder(out.absolute().parent)

    from nsa_train.checkpoint.manifest import read_key
    from nsa_train.convert.import_folder import import_folder

    imported = import_folder(folder, out, key=read_key(key_file))
    tensors = sum(tensor.numel() for tensor in imported.tensors.values())
    print_line(f"wrote {out} ({tensors:,} parameters); start a run with: nsa train CONFIG --init-from {out}")
