"""`nsa convert`: dense models to sparse ones and back; `nsa export hf`, `nsa import hf`: to Transformers and back."""

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nsa.errors import CheckpointError, ConfigError
from nsa.geometry import Geometry
from nsa.options import SELECTING_KINDS
from nsa_train.cli.early_checks import MODEL_PACKAGES, find_model, require_packages, require_tokenizer
from nsa_train.cli.model_options import KEY
from nsa_train.cli.outputs import ProgressLine, print_json, print_line, print_rejected, require_writable_folder

if TYPE_CHECKING:
    from nsa_train.convert.dense.convert_folder import ConvertedModel, DenseExport

# With a callback, a group of one command keeps its name.
_group = partial(typer.Typer, no_args_is_help=True, callback=lambda: None)
export_app = _group(help="Export a checkpoint for other software.")
import_app = _group(help="Import a model of other software as a checkpoint.")


def _existing_folder(path: Path) -> Path:
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not a folder. Name one with config.json and model.safetensors, e.g. made by `hf download NAME "
            "--local-dir FOLDER`."
        )
    return path


def _require_new_folder(out: Path, overwrite: bool = False) -> None:
    """What can be refused before the packages that write the folder are imported."""
    from nsa_train.convert.folder_files import require_replaceable

    require_packages(*MODEL_PACKAGES)
    require_writable_folder(out.absolute().parent)
    require_replaceable(out, lambda folder: overwrite)


def convert(
    source: Path = typer.Argument(
        ...,
        metavar="DIR",
        callback=_existing_folder,
        help="A folder with config.json and safetensors; with --to-dense a converted one.",
    ),
    out: Path = typer.Argument(..., metavar="OUT", help="The folder to write; it must not exist or be empty."),
    mix: str = typer.Option(
        None,
        "--mix",
        help="merged (default): one softmax over the selected blocks and the window, without gates. gated: the "
        "three branches of NSA with gates that start at the selected branch.",
    ),
    phi: str = typer.Option(
        None,
        "--phi",
        help="How keys are pooled to choose blocks: avg (default), weighted or softmax, both trained.",
    ),
    l: int = typer.Option(None, "--l", help=f"Length of a compression block (default {Geometry.l})."),
    d: int = typer.Option(None, "--d", help=f"Stride between compression blocks (default {Geometry.d})."),
    l_sel: int = typer.Option(None, "--l-sel", help=f"Length of a selection block (default {Geometry.l_sel})."),
    n_sel: int = typer.Option(None, "--n-sel", help=f"Selected blocks per token (default {Geometry.n_sel})."),
    window: int = typer.Option(None, "--window", help=f"Tokens of the sliding window (default {Geometry.w})."),
    keep_dense: str = typer.Option(None, "--keep-dense", metavar="LAYERS", help="Layers that stay dense, e.g. 0,1,31."),
    keep_window: str = typer.Option(
        None, "--keep-window", metavar="LAYERS", help="Layers that become a sliding window alone, e.g. 2,3."
    ),
    to_dense: bool = typer.Option(
        False, "--to-dense", help="The other way: write a converted model, trained or not, in its source's format."
    ),
    like: Path = typer.Option(
        None,
        "--like",
        help="With --to-dense: the converted folder that training started from, if DIR has no conversion.json.",
    ),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace an earlier conversion in OUT."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Turn a dense model of Transformers into one with sparse attention, with the same weights.

    Reads Llama, Qwen2, Qwen3, Mistral, OLMo 2, OLMo 3, SmolLM3 and Phi-3 (config.json and safetensors; nothing in the
    folder is executed), and models of flash-linear-attention's NSA. Up to n_sel · l_sel + window tokens (gated: n_sel ·
    l_sel) the converted model computes what the dense one computes. Beyond, each token reads that many keys instead of
    all, and the model should be trained on long texts: `nsa train OUT/run.yaml data.path=SET --init-from OUT`, before
    which OUT/warmup.yaml, if there is one, trains the parameters that the source does not have. Layers
    of the source that slide keep their window. `--to-dense` writes the weights back, bit for bit if they were not
    trained.

    **Examples:** `nsa convert Llama-3.2-1B sparse`, `nsa convert Llama-3.2-1B sparse --mix gated --n-sel 32
    --keep-dense 0,1`, and back: `nsa convert sparse dense --to-dense`
    """
    _require_new_folder(out, overwrite)
    sizes = dict(l=l, d=d, l_sel=l_sel, n_sel=n_sel, w=window)
    layers = dict(
        keep_dense=_layers("--keep-dense", keep_dense) or None,
        keep_window=_layers("--keep-window", keep_window) or None,
    )
    values = {name: value for name, value in dict(mix=mix, phi=phi, **sizes, **layers).items() if value is not None}
    if to_dense and values:
        raise ConfigError("--to-dense takes no options of a conversion: what was converted says how. Leave them out.")
    if like is not None and not to_dense:
        raise ConfigError("--like is only for --to-dense. Add it, or leave --like out.")
    with ProgressLine(f"reading {source}") as progress:
        from nsa_train.convert.dense.conversion_plan import ConversionOptions
        from nsa_train.convert.dense.convert_folder import convert_folder, export_dense
        from nsa_train.infer.generate import silence_transformers

        silence_transformers()
        doing = f"{'comparing' if to_dense else f'reading {source}:'} tensor"

        def on_tensor(done: int, total: int) -> None:
            progress.update(f"{doing} {done} of {total}" if done < total else f"writing {out}")

        if to_dense:
            exported = export_dense(source, out, like=like, overwrite=overwrite, on_tensor=on_tensor)
            record, lines = asdict(exported), _dense_lines(exported, out)
        else:
            options = ConversionOptions(**values) if values else None
            converted = convert_folder(source, out, options, overwrite=overwrite, on_tensor=on_tensor)
            record, lines = _as_json(converted), _conversion_lines(converted, out)
    if as_json:
        print_json(record)
        return
    for line in lines:
        print_line(line)


def _layers(option: str, text: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(each) for each in text.split(",")) if text else ()
    except ValueError:
        raise ConfigError(f"{option} is {text!r:.60}: it lists layers from 0 on, e.g. {option} 0,1,31.") from None


def _as_json(converted: "ConvertedModel") -> dict[str, Any]:
    from nsa_train.convert.dense.conversion_plan import covered_tokens

    return {
        "architecture": converted.architecture,
        "parameters": converted.parameters,
        "new_parameters": converted.new_parameters,
        "covered_tokens": covered_tokens(converted.reads),
        "context": converted.config.max_position_embeddings,
        "layers": {kind: asdict(each) for kind, each in converted.reads.items()},
        "tokenizer_problem": converted.tokenizer_problem,
    }


def _conversion_lines(converted: "ConvertedModel", out: Path) -> Iterator[str]:
    from nsa_train.convert.dense.conversion_plan import covered_tokens

    context, covered = converted.config.max_position_embeddings, covered_tokens(converted.reads)
    counts = ", ".join(f"{each.layers} {kind}" for kind, each in converted.reads.items())
    added = f", {converted.new_parameters:,} of them new" if converted.new_parameters else ""
    yield f"wrote {out}: {converted.architecture}, {converted.parameters:,} parameters{added}; layers: {counts}"
    if not set(converted.reads) & set(SELECTING_KINDS):
        yield "no layer became sparse: each slides in the source, or was kept"
    if covered is None:
        yield "computes what the source computes, at any length"
    elif covered >= context:
        yield f"computes what the source computes over its whole context: {covered:,} tokens are covered"
    else:
        yield f"computes what the source computes up to {covered:,} tokens; beyond, train it on long texts"
    for kind, each in converted.reads.items():
        scored = f", chosen by scores of {each.scored:,} compressed keys" if each.scored else ""
        yield f"  {kind}: token {context:,} reads {each.keys:,} of {context:,} keys{scored}"
    if converted.tokenizer_problem is not None:
        yield f"no tokenizer that nsa reads ({converted.tokenizer_problem}); what there is was copied as data"
    config = out / ("warmup.yaml" if converted.new_parameters else "run.yaml")
    yield f"next: nsa generate {out} --prompt TEXT, or nsa train {config} data.path=SET --init-from {out}"


def _dense_lines(exported: "DenseExport", out: Path) -> Iterator[str]:
    yield f"wrote {out}: {exported.architecture}, {exported.tensors} tensors"
    same = exported.unchanged == exported.tensors
    yield (
        "every tensor is the source's, bit for bit"
        if same
        else (f"{exported.tensors - exported.unchanged} of {exported.tensors} tensors differ from the source's")
    )
    if exported.dtype != exported.source_dtype:
        yield f"weights are {exported.dtype}, and config.json is the source's, which was {exported.source_dtype}"
    for name, layers in exported.dropped.items():
        yield f"left out: {name} of {layers} layers, which {exported.architecture} does not have"
    if exported.missing_files:
        yield f"not copied, because they are no longer there: {', '.join(exported.missing_files)}"


@export_app.command("hf")
def export_hf(
    source: Path = typer.Argument(
        ..., metavar="RUN|CHECKPOINT", callback=find_model, help="A run folder (newest good one), or a checkpoint."
    ),
    out: Path = typer.Argument(..., metavar="OUT", help="The folder to write; it must not exist or be empty."),
    dtype: str = typer.Option(None, "--dtype", help="fp32, bf16 or fp16; default: as saved, fp32 for a run."),
    license_name: str = typer.Option(None, "--license", help="Licence for the model card, e.g. apache-2.0."),
    tokenizer: str = typer.Option(
        None,
        "--tokenizer",
        callback=require_tokenizer,
        help="byte or a tokenizer.json; only for checkpoints of earlier versions, which have none.",
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
    _require_new_folder(out, overwrite)

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
    folder: Path = typer.Argument(
        ..., metavar="DIR", callback=_existing_folder, help="A folder that `nsa export hf` or Transformers wrote."
    ),
    out: Path = typer.Argument(..., metavar="OUT", help="The run folder to write; it must not exist or be empty."),
    key_file: Path = KEY,
) -> None:
    """Write a folder in Transformers' format as a run folder with one checkpoint, for `nsa train --init-from OUT`.

    Only safetensors and JSON are read, and nothing in the folder is executed.

    **Example:** `nsa import hf exported artifacts/imported`
    """
    _require_new_folder(out)

    from nsa_train.checkpoint.manifest import read_key
    from nsa_train.convert.import_folder import import_folder

    imported = import_folder(folder, out, key=read_key(key_file))
    tensors = sum(tensor.numel() for tensor in imported.tensors.values())
    print_line(f"wrote {out} ({tensors:,} parameters); start a run with: nsa train CONFIG --init-from {out}")
