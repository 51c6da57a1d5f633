"""Fuzz targets: checkpoint folders that were damaged, and hostile ones whose manifest was written to fit.

Oracle: what loads is bitwise what was saved, or it is refused.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

from nsa.errors import CheckpointError
from nsa_train import names
from nsa_train.checkpoint.folder import CheckpointFolder
from nsa_train.checkpoint.load import export, require_trustworthy
from nsa_train.checkpoint.manifest import LocalFiles, build_manifest, decode, encode
from nsa_train.checkpoint.trained_model import open_trained_model
from tests.fuzz.campaign import FuzzCampaign
from tests.fuzz.mutations import (
    edit_bytes,
    edited_folder,
    edits_of_bytes,
    edits_of_folder,
    json_bytes,
    mutated_bytes,
    mutated_json,
)
from tests.trained_runs import files_of, write_run

STEP = 10
SavedStep = tuple[Path, dict[str, bytes], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedStep:
    """A checkpoint, its files and its tensors."""
    run = write_run(tmp_path_factory.mktemp("run"), steps=(STEP,), dim=16, n_layers=1)
    step = run / names.CHECKPOINTS / f"step{STEP}"
    return step, files_of(step), open_trained_model(step).tensors


def uses(step: Path, out: Path) -> list[Callable[[], dict[str, torch.Tensor] | None]]:
    """Every way to use a checkpoint, in each the tensors if it gives any."""

    def of_trained() -> dict[str, torch.Tensor]:
        trained = open_trained_model(step)
        trained.tokenizer()
        assert trained.vocab_size > 0
        return trained.tensors

    def of_export() -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        export(step, out)
        return load_file(out / names.MODEL_SAFETENSORS)

    def of_listing() -> None:
        resumable = CheckpointFolder(step.parent).find_resumable(lambda path: require_trustworthy(path))
        if resumable.path is None:
            raise CheckpointError("; ".join(map(str, resumable.passed_over)))

    return [of_trained, of_export, of_listing]


def outcomes(step: Path, out: Path) -> tuple[list[dict[str, torch.Tensor]], list[CheckpointError]]:
    loaded, refused = [], []
    for use in uses(step, out):
        try:
            tensors = use()
            if tensors is not None:
                loaded.append(tensors)
        except CheckpointError as error:
            refused.append(error)
    return loaded, refused


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype
        and left[name].shape == right[name].shape
        and left[name].numpy().tobytes() == right[name].numpy().tobytes()
        for name in left
    )


def test_damaged_checkpoints(fuzz: FuzzCampaign, saved: SavedStep, tmp_path: Path) -> None:
    """Any byte changed, any file cut, removed, renamed, exchanged or added: found by a full check, and never loaded."""
    step, files, tensors = saved

    def check(edits: list[list[Any]]) -> None:
        with edited_folder(step, files, edits):
            changed = files_in(step) != files
            loaded, refused = outcomes(step, tmp_path)
            assert all(same(each, tensors) for each in loaded)
            assert bool(refused) == changed
            assert not changed or require_refused(step)
            for error in refused:
                raise error

    cases = edits_of_folder(sorted(files))
    fuzz.run(cases, check, examples=300, good=[[]], read_seed=json.loads)


def require_refused(step: Path) -> bool:
    with pytest.raises(CheckpointError):
        require_trustworthy(step)
    return True


def files_in(folder: Path) -> dict[str, bytes | None]:
    paths = (path for path in folder.rglob("*") if path.is_file() or not path.is_dir() or not any(path.iterdir()))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def commit(step: Path) -> None:
    """A manifest that fits the files, as whoever can write the folder can write it."""
    (step / names.COMMIT).unlink(missing_ok=True)
    (step / names.COMMIT).write_bytes(encode(build_manifest(LocalFiles(step), STEP, "now")))


def test_hostile_checkpoints(fuzz: FuzzCampaign, saved: SavedStep, tmp_path: Path) -> None:
    """Changed files under a manifest that fits: parsed without a trace, into tensors of the shapes that were saved."""
    step, files, tensors = saved
    state = json.loads(files[names.STATE])
    index = f"{names.TENSORS}/{names.TENSOR_INDEX}"
    inside = [name for name in files if name not in (names.COMMIT, names.STATE)]

    def check(case: list[Any]) -> None:
        name, how = case
        raw = files[name]
        if name == names.STATE:
            raw = json_bytes(how)
        else:
            for edit in how:
                raw = edit_bytes(raw, edit)
        with edited_folder(step, files, [[name, "empty", names.COMMIT]]):
            (step / name).write_bytes(raw)
            commit(step)
            loaded, refused = outcomes(step, tmp_path)
            for value in loaded if name in (names.STATE, names.TOKENIZER) else ():
                assert same(value, tensors)
            for error in refused:
                raise error

    def reseal(values: Any) -> Any:
        """A record of a run whose own fingerprint fits."""
        if isinstance(values, dict) and "config_fingerprint" in values:
            text = json.dumps(values.get("config"), sort_keys=True).encode()
            values["config_fingerprint"] = hashlib.sha256(text).hexdigest()
        return values

    several = st.lists(edits_of_bytes(), min_size=1, max_size=4)
    states = mutated_json(state).map(reseal)
    cases = st.one_of(
        st.tuples(st.sampled_from(inside), several),
        st.tuples(st.just(index), several),
        st.tuples(st.just(names.STATE), states),
    ).map(list)
    fuzz.run(cases, check, examples=300, good=[[names.STATE, state]], read_seed=json.loads)


def test_checkpoint_manifests(fuzz: FuzzCampaign, saved: SavedStep, tmp_path: Path) -> None:
    """COMMIT.json with other values and a hash that fits, or with changed bytes."""
    step, files, tensors = saved
    good = json.loads(files[names.COMMIT])

    def check(raw: bytes) -> None:
        with edited_folder(step, files, [[names.COMMIT, "empty", names.COMMIT]]):
            (step / names.COMMIT).write_bytes(raw)
            loaded, refused = outcomes(step, tmp_path)
            assert all(same(each, tensors) for each in loaded)
            assert raw == files[names.COMMIT] or refused or decode(raw).files == decode(files[names.COMMIT]).files
            for error in refused:
                raise error
            assert raw == sealed(json.loads(raw)["commit"]), "the hash of the manifest does not fit"

    def canonical(document: Any) -> bytes:
        return json.dumps(document, sort_keys=True, indent=1, ensure_ascii=True).encode() + b"\n"

    def sealed(body: Any) -> bytes:
        return canonical({"commit": body, "sha256": hashlib.sha256(canonical(body)).hexdigest()})

    unsealed = mutated_json(good["commit"]).map(lambda body: canonical({**good, "commit": body}))
    cases = st.one_of(mutated_json(good["commit"]).map(sealed), unsealed, mutated_bytes(files[names.COMMIT]))
    fuzz.run(cases, check, examples=300, good=[files[names.COMMIT]])
