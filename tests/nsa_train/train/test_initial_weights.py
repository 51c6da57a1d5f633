"""`--init-from`: a new run starts with the weights of a checkpoint, at step 0, without its optimizer state."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from nsa.errors import CheckpointError, ConfigError
from nsa_train.checkpoint.trained_model import open_trained_model
from nsa_train.cli.train import import_exported
from nsa_train.config.schema import RunConfig
from nsa_train.data.prepare.plan import make_plan
from nsa_train.data.prepare.run import prepare
from nsa_train.train.resume import find_initial_weights
from tests.nsa_train.train.runs import Job, run_all

FEW = ["train.steps=3", "train.warmup_steps=1"]
STILL = ["train.steps=1", "train.warmup_steps=0", "train.lr=1e-12", "train.weight_decay=0"]


def losses(run: Path) -> list[float]:
    records = map(json.loads, (run / "heartbeat_rank0.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["msg"] == "progress"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """A run, its weights exported and imported, and new runs that start from each."""
    pytest.importorskip("transformers", reason="Transformers is in the hf extra")
    from nsa_train.convert.export_folder import export_folder
    from nsa_train.convert.import_folder import import_folder

    folder = tmp_path_factory.mktemp("runs")
    assert run_all(Job(str(folder / "first"), changes=["train.steps=12", "train.seed=1"])) == [[0]]
    export_folder(folder / "first", folder / "exported")
    import_folder(folder / "exported", folder / "imported")
    first, imported = str(folder / "first"), str(folder / "imported")
    codes = run_all(
        Job(str(folder / "new"), changes=FEW),
        Job(str(folder / "from_run"), changes=FEW, init_from=first),
        Job(str(folder / "from_import"), changes=FEW, init_from=imported),
        Job(str(folder / "two_ranks"), world=2, changes=[*FEW, "parallel.data=fsdp"], init_from=imported),
        Job(str(folder / "still"), changes=STILL, init_from=imported),
        Job(str(folder / "from_run"), changes=["train.steps=5", "train.warmup_steps=1"], resume=True, init_from=first),
        Job(str(folder / "wider"), changes=[*FEW, "model.dim=64"], init_from=first),
        Job(str(folder / "deeper"), changes=[*FEW, "model.n_layers=3"], init_from=first),
        Job(str(folder / "direct"), changes=FEW, init_from=str(folder / "exported")),
        Job(str(folder / "direct_ranks"), world=2, changes=FEW, init_from=str(folder / "exported")),
    )
    assert codes == [[0], [0], [0], [0, 0], [0], [0], [22], [22], [0], [0, 0]]
    return folder


def test_exported_and_imported_weights_give_the_losses_of_the_checkpoint(runs):
    of_run, of_import = losses(runs / "from_run")[:3], losses(runs / "from_import")
    assert of_import == of_run
    assert len(of_import) == 3
    assert of_import[0] != losses(runs / "new")[0]


def test_sharded_ranks_start_with_them_too(runs):
    assert losses(runs / "two_ranks") == pytest.approx(losses(runs / "from_import"), rel=1e-4)


def test_the_weights_are_those_of_the_checkpoint_and_the_step_is_zero(runs):
    first, still = open_trained_model(runs / "first"), open_trained_model(runs / "still")
    assert still.record.step == 1
    assert all(torch.allclose(still.tensors[name], tensor, atol=1e-9) for name, tensor in first.tensors.items())


def test_a_run_that_has_a_checkpoint_resumes_from_it_instead(runs):
    steps = [json.loads(line) for line in (runs / "from_run/heartbeat_rank0.jsonl").read_text().splitlines()]
    assert [record["step"] for record in steps if record["msg"] == "progress"] == [1, 2, 3, 4, 5]


def test_a_refused_start_saves_nothing(runs):
    for name in ("wider", "deeper"):
        assert not list((runs / name).glob("checkpoints/step*"))


def test_an_exported_folder_is_a_start_like_its_import(runs):
    assert losses(runs / "direct") == losses(runs / "from_import")
    assert losses(runs / "direct_ranks") == pytest.approx(losses(runs / "from_import"), rel=1e-4)
    for name in ("direct", "direct_ranks"):
        assert not [path for path in (runs / name).iterdir() if "imported" in path.name], "nothing is left of it"


def test_data_of_another_tokenizer_is_refused(runs, tmp_path):
    """Compares fingerprints: an equal vocabulary size is not enough."""
    from nsa_train.data.tokenizer import train_bpe

    bpe = train_bpe(["some words of text"] * 9, 257, tmp_path / "bpe.json")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("some words of text " * 99)
    for spec, accepted in (("byte", True), (str(tmp_path / "bpe.json"), False)):
        prepare(make_plan(str(tmp_path / "text"), spec), str(tmp_path / repr(accepted)), workers=1)
        for data in (
            {"dataset": "prepared", "path": str(tmp_path / repr(accepted))},
            {"dataset": "local", "path": str(tmp_path / "text"), "tokenizer": spec},
        ):
            trained = open_trained_model(runs / "first")
            config = RunConfig.model_validate(trained.config.model_dump(mode="json") | {"data": data})
            if accepted:
                find_initial_weights(runs / "first", config, bpe.vocab_size, None, tmp_path / "unused")
                continue
            for start in (runs / "first", runs / "exported"):
                scratch = tmp_path / f"{start.name}{data['dataset']}"
                with pytest.raises(ConfigError, match=r"--tokenizer .*tokenizer\.json"):
                    find_initial_weights(start, config, bpe.vocab_size, None, scratch, import_exported)


def test_without_an_importer_an_exported_folder_is_refused(runs, tmp_path):
    with pytest.raises(CheckpointError, match="nsa import hf"):
        find_initial_weights(runs / "exported", RunConfig(), 257, None, tmp_path / "unused")


def test_other_settings_of_the_model_are_named(runs):
    trained = open_trained_model(runs / "first")
    other = trained.config.model_copy(
        update={"model": trained.config.model.model_copy(update={"rope_base": 10_000.0}), "train": RunConfig().train}
    )
    path, changes = find_initial_weights(runs / "first", other, 257, None, runs / "unused")
    assert path == trained.path
    assert [change.key for change in changes] == ["model.rope_base"]


def test_damaged_weights_are_refused(runs, tmp_path):
    run = Path(shutil.copytree(runs / "imported", tmp_path / "run", symlinks=True))
    state = run / "checkpoints/step12/state.json"
    state.write_text(state.read_text().replace('"step": 12', '"step": 13'))
    for path in (run, run / "checkpoints/step12"):
        with pytest.raises(CheckpointError):
            find_initial_weights(path, RunConfig(), 257, None, tmp_path / "unused")
