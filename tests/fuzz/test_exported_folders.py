"""Fuzz target: folders in Transformers' format, which may come from anyone.

Oracle: the exported tensors, wherever only files beside the weights were changed.
"""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

pytest.importorskip("transformers", reason="exported folders are in the hf extra")

from nsa.errors import NSAError
from nsa_train import names
from nsa_train.convert.export_folder import export_folder
from nsa_train.convert.folder_files import CONFIG
from nsa_train.convert.import_folder import import_folder, open_exported
from nsa_train.convert.tokenizer_files import TOKENIZER_CONFIG
from nsa_train.convert.training_record import TRAINING_RECORD
from nsa_train.convert.weight_files import _WEIGHTS_INDEX
from nsa_train.infer import load_model
from tests.fuzz.campaign import FuzzCampaign
from tests.fuzz.mutations import edited_folder, edits_of_folder, json_bytes, mutated_json
from tests.trained_runs import files_of, write_run

DOCUMENTS = (CONFIG, TOKENIZER_CONFIG, TRAINING_RECORD, _WEIGHTS_INDEX)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """A folder with several weights files, and its files."""
    run = write_run(tmp_path_factory.mktemp("run"), dim=16, n_layers=1)
    folder = tmp_path_factory.mktemp("exports") / "exported"
    export_folder(run, folder, shard_bytes=20_000)
    files = files_of(folder)
    assert set(DOCUMENTS) < files.keys()
    return folder, files


def header_of(raw: bytes) -> Any:
    return json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])


def with_header(raw: bytes, header: Any) -> bytes:
    text = json_bytes(header)
    return struct.pack("<Q", len(text)) + text + raw[8 + struct.unpack("<Q", raw[:8])[0] :]


def _transposed(files: dict[str, bytes], weights: list[str]) -> tuple[str, Any]:
    """The header of a weights file in which a matrix has its sizes exchanged."""
    for name in weights:
        header = header_of(files[name])
        for entry in header.values():
            if len(shape := entry.get("shape", ())) == 2 and shape[0] != shape[1]:
                entry["shape"] = shape[::-1]
                return name, header
    raise AssertionError("all matrices are square")


def test_exported_folders(fuzz: FuzzCampaign, exported: tuple[Path, dict[str, bytes]], tmp_path: Path) -> None:
    """A changed folder is refused, or it loads, generates and can be imported; untouched weights stay as they were."""
    folder, files = exported
    tensors = {key: tensor.clone() for key, tensor in open_exported(folder).tensors.items()}  # not mapped files
    weights = sorted(name for name in files if name.endswith(".safetensors"))
    loads = 0

    def check(case: list[Any]) -> None:
        nonlocal loads
        what, name, how = case
        edits = how if what == "edits" else [[name, "empty", name]]
        with edited_folder(folder, files, edits):
            if what == "document":
                (folder / name).write_bytes(json_bytes(how))
            elif what == "header":
                (folder / name).write_bytes(with_header(files[name], how))
            model = open_exported(folder)
            if what == "document":
                json.dumps(how, allow_nan=False)  # raises if a number that is not finite was accepted
                assert model.tensors.keys() == tensors.keys()
                assert all(torch.equal(model.tensors[key], tensors[key]) for key in tensors)
            loaded = load_model(folder, device="cpu")
            loads += 1
            if loads <= 40:  # most accepted changes are of files that generation does not read
                loaded.generate("The ", temperature=0, max_new_tokens=2)
                import_folder(folder, tmp_path / f"imported{loads}")

    documents = st.sampled_from(DOCUMENTS).flatmap(
        lambda name: st.tuples(st.just("document"), st.just(name), mutated_json(json.loads(files[name])))
    )
    configs = st.tuples(st.just("document"), st.just(CONFIG), mutated_json(json.loads(files[CONFIG])))
    headers = st.sampled_from(weights).flatmap(
        lambda name: st.tuples(st.just("header"), st.just(name), mutated_json(header_of(files[name])))
    )
    read = [*DOCUMENTS, *weights, names.TOKENIZER]
    edits = st.tuples(st.just("edits"), st.just(""), edits_of_folder(read))
    cases = st.one_of(documents, configs, headers, edits).map(list)
    not_a_number = {**json.loads(files[CONFIG]), "rms_norm_eps": math.nan}
    with pytest.raises(NSAError):
        check(["document", CONFIG, not_a_number])
    name, header = _transposed(files, weights)
    with edited_folder(folder, files, [[name, "empty", name]]):
        (folder / name).write_bytes(with_header(files[name], header))
        with pytest.raises(NSAError):
            open_exported(folder)
    fuzz.run(cases, check, examples=250, good=[["edits", "", []]], read_seed=json.loads)
