"""`nsa checkpoint`: list, verify and export the checkpoints of a run."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nsa.errors import CheckpointError
from nsa_train.cli.model_options import KEY
from nsa_train.cli.outputs import print_json, print_line, print_rejected, require_writable_folder

if TYPE_CHECKING:
    from nsa_train.checkpoint.folder import CheckpointFolder, RetentionPolicy

app = typer.Typer(help="List, verify and export the checkpoints of a run.", no_args_is_help=True)

_RUN = typer.Argument(..., metavar="RUN", help="A run folder, or its checkpoints folder.")


@app.command("ls")
def list_checkpoints(
    run: Path = _RUN,
    key_file: Path = KEY,
    as_json: bool = typer.Option(False, "--json", help="Print JSON: folder, checkpoints, in_use_by."),
) -> None:
    """List checkpoints, newest last, with the reason each was saved and is kept; checks names and sizes, not hashes.

    Exit code: 0, also if one is damaged (`nsa checkpoint verify` fails); 22 if there is none.

    **Example:** `nsa checkpoint ls artifacts/run`
    """
    from nsa_train.checkpoint.lock import holder
    from nsa_train.names import step_name

    folder = _open(run, key_file)
    saved = {step: manifest.reason for step, manifest in folder.committed().items()}
    reasons = _retention(folder, max(saved, default=None)).why_kept(saved)
    rows = [_row(folder, step, reasons.get(step, ())) for step in folder.require_steps()]
    owner = holder(folder.path.parent)
    if as_json:
        print_json({"folder": folder.path, "checkpoints": rows, "in_use_by": owner})
        return
    for row in rows:
        mark = " ← latest" if row["latest"] else ""
        if row["good"]:
            size = f"{row['bytes'] / 2**20:10.1f} MiB  {row['files']:5d} files"
            why = f"saved: {row['saved_because']:9}  kept: {', '.join(row['kept_because']) or 'no longer'}"
            print_line(f"{step_name(row['step']):12}  {row['saved_at']}  {size}  {why}{mark}")
        else:
            print_line(f"{step_name(row['step']):12}  BAD: {'; '.join(row['problems'])}{mark}")
    if owner:
        print_line(f"in use by {owner}")


def _row(folder: "CheckpointFolder", step: int, reasons: Sequence[str]) -> dict[str, Any]:
    """One checkpoint, as `nsa checkpoint ls --json` prints it."""
    verdict = folder.examine(step, deep=False)
    row = {"step": step, "path": str(folder.step_path(step)), "latest": step == folder.latest()}
    row |= {"good": verdict.good, "problems": list(verdict.problems)}
    if (manifest := verdict.manifest) is None or not verdict.good:
        return row
    return {
        **row,
        "saved_at": manifest.saved_at,
        "bytes": manifest.bytes,
        "files": len(manifest.files),
        "saved_because": manifest.reason,
        "kept_because": list(reasons),
    }


@app.command()
def verify(
    path: Path = typer.Argument(..., metavar="RUN|CHECKPOINT", help="A run folder, or one checkpoint in it."),
    key_file: Path = KEY,
    as_json: bool = typer.Option(False, "--json", help="Print JSON: for each checkpoint, good, problem, files, bytes."),
) -> None:
    """Compare every file with its SHA-256 and scan every pickle without executing it.

    Exit code: 0 if all are good, 22 if one is not, or if there is none.

    **Example:** `nsa checkpoint verify artifacts/run/checkpoints/latest`
    """
    from nsa_train.checkpoint.folder import resolve_links
    from nsa_train.checkpoint.load import require_trustworthy
    from nsa_train.checkpoint.manifest import read_key
    from nsa_train.names import step_of

    one = resolve_links(path)
    if step_of(one.name) is not None:
        wanted = [one]
    else:
        folder = _open(path, key_file)
        wanted = [folder.step_path(step) for step in folder.require_steps()]
    key = read_key(key_file)
    verdicts: list[dict[str, Any]] = []
    verdict: dict[str, Any]
    for checkpoint in wanted:
        try:
            manifest = require_trustworthy(checkpoint, key=key).manifest
        except CheckpointError as error:
            verdict, line = {"problem": str(error)}, f"BAD   {error}"
        else:
            assert manifest is not None
            files, size = len(manifest.files), manifest.bytes
            verdict = {"problem": None, "files": files, "bytes": size, "signed": bool(key)}
            line = f"good  {checkpoint} ({files} files, {size / 2**20:.1f} MiB{', signed' if key else ''})"
        verdicts.append({"path": str(checkpoint), "good": verdict["problem"] is None, **verdict})
        if not as_json:
            print_line(line)
    if as_json:
        print_json(verdicts)
    if not all(verdict["good"] for verdict in verdicts):
        raise typer.Exit(CheckpointError.exit_code)


@app.command()
def export(
    checkpoint: Path = typer.Argument(..., help="A checkpoint, or a run folder to export its newest valid checkpoint."),
    out: Path = typer.Option(Path(), "--out", help="Folder for model.pt and model.safetensors."),
    key_file: Path = KEY,
    allow_foreign: bool = typer.Option(
        False,
        "--allow-foreign",
        help="Accept a DCP folder without COMMIT.json; corruption is then not detected.",
    ),
) -> None:
    """Write model.pt and model.safetensors from a verified checkpoint, without executing anything in it.

    **Example:** `nsa checkpoint export artifacts/run --out exported`
    """
    require_writable_folder(out)

    from nsa_train.checkpoint.folder import resolve_links
    from nsa_train.checkpoint.load import export as write
    from nsa_train.checkpoint.manifest import read_key
    from nsa_train.checkpoint.trained_model import find_checkpoint

    key = read_key(key_file)
    if allow_foreign:
        source = resolve_links(checkpoint)
    else:
        source = find_checkpoint(checkpoint, key=key, on_rejected=print_rejected)
    for path in write(source, out, key=key, allow_foreign=allow_foreign):
        print_line(f"wrote {path} from {source.name}")


@app.command()
def push(
    checkpoint: Path = typer.Argument(..., help="A checkpoint, e.g. RUN/checkpoints/latest."),
    url: str = typer.Argument(..., help="s3://BUCKET/PATH of the checkpoints of this run."),
    key_file: Path = KEY,
) -> None:
    """Upload a verified checkpoint to an object store; COMMIT.json is written last, so a partial upload is ignored.

    **Example:** `nsa checkpoint push artifacts/run/checkpoints/latest s3://models/run`
    """
    from nsa_train.checkpoint.folder import resolve_links
    from nsa_train.checkpoint.manifest import read_key
    from nsa_train.checkpoint.transfer import push as copy

    print_line(f"wrote {copy(resolve_links(checkpoint), url, key=read_key(key_file))}")


@app.command()
def pull(
    url: str = typer.Argument(..., help="s3://BUCKET/PATH of the checkpoints of a run."),
    run: Path = typer.Argument(..., metavar="RUN", help="The run folder to download the newest valid checkpoint into."),
    key_file: Path = KEY,
    max_gib: float = typer.Option(None, "--max-gib", help="Refuse checkpoints larger than this.", min=0.0),
    allow_empty: bool = typer.Option(
        False, "--allow-empty", help="Exit code 0 if the store has no checkpoint yet; damaged ones remain an error."
    ),
) -> None:
    """Download the newest valid checkpoint from an object store into a run folder and verify it.

    **Example:** `nsa checkpoint pull s3://models/run artifacts/run`
    """
    from nsa_train.checkpoint.folder import CheckpointFolder
    from nsa_train.checkpoint.lock import RunLock
    from nsa_train.checkpoint.manifest import read_key
    from nsa_train.checkpoint.transfer import GIB
    from nsa_train.checkpoint.transfer import pull as copy
    from nsa_train.names import CHECKPOINTS

    key = read_key(key_file)
    with RunLock(run):
        limit = None if max_gib is None else int(max_gib * GIB)
        result = copy(url, CheckpointFolder(run / CHECKPOINTS, key=key), key=key, max_bytes=limit)
    for finding in result.passed_over:
        print_rejected(finding)
    if result.path is None and allow_empty and not result.passed_over:
        print_line(f"{url} has no checkpoint yet")
        return
    if result.path is None:
        raise CheckpointError(f"{url} holds no good checkpoint.")
    print_line(f"wrote {result.path}")


def _retention(folder: "CheckpointFolder", newest: int | None) -> "RetentionPolicy":
    """Retention settings recorded in the newest checkpoint; the default if there is no record."""
    from nsa_train.checkpoint.folder import RetentionPolicy
    from nsa_train.checkpoint.run_state import RunRecord

    if newest:
        with suppress(CheckpointError, AttributeError, TypeError, ValueError):
            return RetentionPolicy.from_settings(RunRecord.read(folder.step_path(newest)).config)
    return RetentionPolicy()


def _open(run: Path, key_file: Path | None) -> "CheckpointFolder":
    from nsa_train.checkpoint.folder import open_folder
    from nsa_train.checkpoint.manifest import read_key

    return open_folder(run, key=read_key(key_file))
