"""Warm-up and healing of a converted model by the files in its folder: what is trained, resume, and the way back."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

pytest.importorskip("transformers", reason="Transformers is in the hf extra")
pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from nsa_train.config import load
from nsa_train.convert.dense.conversion_plan import ConversionOptions
from nsa_train.convert.dense.convert_folder import RUN_CONFIG, WARMUP_CONFIG, convert_folder, export_dense
from nsa_train.convert.export_folder import export_folder
from tests.nsa_train.convert.dense_sources import save_dense
from tests.nsa_train.train.runs import Job, run_all

SMALL = dict(l=8, d=4, l_sel=16, n_sel=4, w=24)
HERE = ["runtime.device=cpu", "runtime.precision=fp32", "runtime.threads=1", "data.dataset=synthetic"]
HERE += ["data.synthetic_task=recall", "data.prefetch=false", "train.seq_len=192", "train.batch_size=2"]
HERE += ["train.log_every=1", "train.eval_every=0", "train.save_every=0", "nsa.selector_loss_share=1.0"]
STEPS = 20


def converted(folder: Path, **options) -> Path:
    save_dense(folder / "dense", "llama")
    convert_folder(folder / "dense", folder / "sparse", ConversionOptions(**SMALL, **options))
    return folder / "sparse"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("healing")
    sparse = str(converted(folder, phi="softmax", keep_dense=(0,)))

    def warmup(name, steps, **more):
        changes = [*HERE, f"train.steps={steps}", "train.lr=0.03"]
        return Job(str(folder / name), changes=changes, config=f"{sparse}/{WARMUP_CONFIG}", **more)

    healing = [*HERE, "train.steps=3", "train.warmup_steps=1"]
    codes = run_all(
        warmup("whole", STEPS, init_from=sparse),
        warmup("stopped", 12, init_from=sparse),
        warmup("stopped", STEPS, resume=True),
        Job(str(folder / "healed"), changes=healing, config=f"{sparse}/{RUN_CONFIG}", init_from=str(folder / "whole")),
    )
    assert codes == [[0]] * 4
    return folder


def progress(run: Path) -> list[tuple]:
    records = map(json.loads, (run / "heartbeat_rank0.jsonl").read_text().splitlines())
    wanted = ("step", "loss", "grad_norm", "selector_loss")
    by_step = {r["step"]: tuple(r[name] for name in wanted) for r in records if r["msg"] == "progress"}
    return [by_step[step] for step in sorted(by_step)]


def exported(run: Path) -> dict[str, torch.Tensor]:
    out = run.parent / f"{run.name}_exported"
    if not out.exists():
        export_folder(run, out)
    return load_file(out / "model.safetensors")


def test_the_warm_up_trains_phi_and_leaves_every_tensor_of_the_source(runs):
    before, after = load_file(runs / "sparse" / "model.safetensors"), exported(runs / "whole")
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if ".phi_k." in name}
    assert len(changed) == 2 * 3


def test_the_divergence_falls(runs):
    of_loss = [step[3] for step in progress(runs / "whole")]
    assert len(of_loss) == STEPS
    assert sum(of_loss[-5:]) < 0.95 * sum(of_loss[:5])


def test_a_resumed_warm_up_is_bit_identical(runs):
    assert progress(runs / "stopped") == progress(runs / "whole")
    mine, theirs = exported(runs / "stopped"), exported(runs / "whole")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_healing_trains_everything_from_there_and_can_go_back(runs):
    before, after = exported(runs / "whole"), exported(runs / "healed")
    assert all(not torch.equal(before[name], after[name]) for name in before)
    back = export_dense(runs / "healed_exported", runs / "back", like=runs / "sparse")
    assert back.unchanged == 0
    assert set(back.dropped) == {"attention.phi_k.w_score", "attention.phi_k.w_square"}
    still = export_dense(runs / "whole_exported", runs / "still", like=runs / "sparse")
    assert still.unchanged == still.tensors


@pytest.mark.parametrize(
    ("options", "trainable", "loss"),
    [
        (dict(phi="weighted"), ["*.phi_k.*"], ("all", 1.0)),
        (dict(mix="gated"), ["*.gates.*"], ("chosen", 0.0)),
        (dict(mix="gated", phi="softmax"), ["*.phi_k.*", "*.gates.*", "*.phi_v.*"], ("all", 1.0)),
    ],
)
def test_each_conversion_has_the_recipe_of_its_new_parameters(tmp_path, options, trainable, loss):
    from nsa_train.planning.model_figures import model_figures

    sparse = converted(tmp_path, **options)
    config = load(sparse / WARMUP_CONFIG)
    assert list(config.train.trainable) == trainable
    assert (config.nsa.selector_blocks, config.nsa.selector_loss) == loss
    assert config.train.lr_schedule == "constant"
    now, before = (load_file(each / "model.safetensors") for each in (sparse, tmp_path / "dense"))
    assert model_figures(config, 101).trained_tensors == len(now) - len(before)
    healing = load(sparse / RUN_CONFIG)
    assert healing.model == config.model
    assert (healing.train.lr, healing.train.trainable) == (3e-5, ("*",))
    assert "--init-from RUNS/warmup" in (sparse / RUN_CONFIG).read_text()


def test_without_new_parameters_there_is_no_warm_up(tmp_path):
    sparse = converted(tmp_path)
    assert not (sparse / WARMUP_CONFIG).exists()
    assert "--init-from OUT" in (sparse / RUN_CONFIG).read_text()
    assert yaml.safe_load((sparse / RUN_CONFIG).read_text())["train"]["lr"] < 1e-4


def test_lora_heals_a_converted_folder_and_goes_back_to_the_dense_format(tmp_path):
    """Follows docs/TRANSFORMERS.md, which shows it for an exported folder. φ is frozen with everything else but the
    adapters."""
    import peft
    from transformers import AutoModelForCausalLM

    sparse = converted(tmp_path, phi="softmax")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(sparse)
    settings = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=4)
    adapted = peft.get_peft_model(model, settings).train()
    ids = torch.randint(3, 101, (2, 120))
    optimizer = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(4):
        loss = adapted(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all("lora_" in name for name, p in adapted.named_parameters() if p.requires_grad)
    adapted.merge_and_unload().save_pretrained(tmp_path / "healed")
    back = export_dense(tmp_path / "healed", tmp_path / "back", like=sparse)
    assert 0 < back.unchanged < back.tensors, "norms and embeddings are the source's, projections are not"
