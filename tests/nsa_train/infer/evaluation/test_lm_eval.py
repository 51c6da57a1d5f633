"""lm-evaluation-harness: the same answers through Transformers and through our own model; refusals; its own command.

Each test imports the harness itself: with the collection it would be imported in every process of the tests.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nsa.errors import CheckpointError, ConfigError
from nsa_train.convert.export_folder import export_folder
from nsa_train.data.tokenizer import train_bpe
from nsa_train.infer.evaluation.far_tasks import BUILT_IN, hay_of_file
from nsa_train.infer.load_model import load_model
from nsa_train.shipped import CORPUS
from tests.trained_runs import save_run, settings

ROOT = Path(__file__).parents[4]
CHOICE = """\
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
GENERATE = """\
task: local_generate
dataset_path: json
dataset_kwargs: {data_files: {test: FOLDER/choice.jsonl}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {do_sample: false, max_gen_toks: 12, until: ["\\n\\n"]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    words = ["stone", "river", "bread", "cloud"]
    with (folder / "choice.jsonl").open("w") as file:
        for number in range(6):
            question = f"{BUILT_IN.strip()[100 * number : 100 * number + 90 + number]} the"
            file.write(json.dumps(dict(question=question, choices=words, answer=number % 4)) + "\n")
    for name, text in (("choice", CHOICE), ("generate", GENERATE)):
        (folder / f"{name}.yaml").write_text(text.replace("FOLDER", str(folder)))
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save_run(folder)
    return folder


def samples(model, names, **options):
    from lm_eval import simple_evaluate

    output = simple_evaluate(model=model, tasks=names, log_samples=True, bootstrap_iters=0, **options)
    return output["results"], {
        name: [(each["doc_id"], each["resps"]) for each in output["samples"][name]] for name in names
    }


def rounded(resps):
    return json.loads(json.dumps(resps), parse_float=lambda text: round(float(text), 3))


def test_the_same_answers_and_scores_through_transformers_and_through_our_own_model(run, tasks, tmp_path):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from nsa_train.infer.evaluation.lm_eval import NSAHarnessModel
    from tests.nsa_train.infer.evaluation.own_model import OwnHarnessModel

    names = ["local_choice", "local_generate"]
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    export_folder(run, tmp_path / "exported")
    through_hf = HFLM(pretrained=str(tmp_path / "exported"), device="cpu", backend="causal", dtype="float32")
    through_ours = NSAHarnessModel(str(run), device="cpu")
    own = OwnHarnessModel(str(run), device="cpu")
    outputs = [samples(model, names, task_manager=manager) for model in (through_hf, through_ours, own)]
    for scores, answers in outputs[1:]:
        assert scores["local_choice"]["acc,none"] == outputs[0][0]["local_choice"]["acc,none"]
        assert answers["local_generate"] == outputs[0][1]["local_generate"]
        assert rounded(answers["local_choice"]) == rounded(outputs[0][1]["local_choice"])
    texts = {resps[0][0] for _, resps in outputs[0][1]["local_generate"]}
    assert len(texts) > 1, "every answer is the same: the comparison says little"


def test_chat_templates_are_those_of_the_harness_and_have_limits(run, tmp_path):
    from lm_eval.models.huggingface import HFLM

    from nsa_train.infer.evaluation.lm_eval import NSAHarnessModel

    exported = tmp_path / "exported"
    export_folder(run, exported)
    template = exported / "chat_template.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    said = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    ours = NSAHarnessModel(str(exported), device="cpu")
    for prompted in (True, False):
        assert ours.apply_chat_template(said, prompted) == HFLM.apply_chat_template(ours, said, prompted)
    template.write_text("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
    with pytest.raises(CheckpointError):
        NSAHarnessModel(str(exported), device="cpu").apply_chat_template(said[1:])


def test_results_by_task_and_options_of_the_harness(run, tasks, tmp_path):
    from nsa_train.infer.evaluation.lm_eval import evaluate_with_harness

    loaded = load_model(run, device="cpu")
    out = tmp_path / "kept"
    words = ["--include_path", str(tasks), "--limit", "4", "--output_path", str(out), "--log_samples"]
    tasks_found = evaluate_with_harness(loaded, "local_choice,local_generate", words)
    assert set(tasks_found) == {"lm_eval/local_choice", "lm_eval/local_generate"}
    assert tasks_found["lm_eval/local_choice"]["metrics"]["acc,none"] in (0.0, 0.25, 0.5, 0.75, 1.0)
    assert tasks_found["lm_eval/local_choice"]["settings"]["samples"] == 4
    assert len(list(out.rglob("samples_*.jsonl"))) == 2


def test_endless_and_reserved_requests_are_refused(run):
    from nsa_train.infer.evaluation.lm_eval import evaluate_with_harness

    loaded = load_model(run, device="cpu")
    for tasks in ("ruler_vt", "niah_single_1,ruler_vt", "ruler"):
        with pytest.raises(ConfigError, match="byte tokenizer"):
            evaluate_with_harness(loaded, tasks, [])
    with pytest.raises(ConfigError, match="--model"):
        evaluate_with_harness(loaded, "local_choice", ["--model", "hf"])


@pytest.mark.nightly  # a new process that lists all tasks of the harness
def test_the_harnesss_own_command_knows_our_models(run, tasks, tmp_path):
    command = [
        sys.executable,
        "-m",
        "nsa_train.infer.evaluation.lm_eval",
        "run",
        "--model",
        "nsa",
        "--tasks",
        "local_choice",
    ]
    command += ["--model_args", f"pretrained={run}", "--device", "cpu", "--include_path", str(tasks), "--limit", "2"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "local_choice" in done.stdout


RULER = ["niah_single_1", "niah_multikey_2", "ruler_fwe"]


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_ruler_gives_the_same_answers_through_transformers_and_through_our_own_model(tmp_path):
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    from tests.nsa_train.infer.evaluation.own_model import OwnHarnessModel

    tokenizer = train_bpe([hay_of_file(CORPUS).text], 4096, tmp_path / "bpe.json")
    config = settings(train={"seq_len": 4096}, model={"dim": 64, "d_k": 16, "d_v": 16})
    save_run(tmp_path / "run", config, tokenizer=tokenizer)
    export_folder(tmp_path / "run", tmp_path / "exported")
    metadata = {"max_seq_lengths": [4096], "tokenizer": str(tmp_path / "exported")}
    options = dict(
        task_manager=TaskManager(metadata=metadata), limit=4, gen_kwargs="max_gen_toks=24", metadata=metadata
    )
    exported = str(tmp_path / "exported")
    through_hf = HFLM(pretrained=exported, device="cpu", backend="causal", dtype="float32", max_length=8192)
    own = OwnHarnessModel(str(tmp_path / "run"), device="cpu", max_length=8192)
    (scores_hf, answers_hf), (scores_own, answers_own) = (samples(m, RULER, **options) for m in (through_hf, own))
    assert answers_hf == answers_own
    assert scores_hf == scores_own
    assert len({str(resps) for task in RULER for _, resps in answers_hf[task]}) > 6
    for task in RULER:
        assert 0 <= scores_hf[task]["4096,none"] <= 1


def test_byte_tokenizers_are_recognised_by_their_length_and_bpe_is_not_refused(tmp_path):
    from nsa_train.infer.evaluation.lm_eval import _require_finite

    tokenizer = train_bpe([BUILT_IN * 5], 600, tmp_path / "bpe.json")
    save_run(tmp_path / "run", tokenizer=tokenizer)
    loaded = load_model(tmp_path / "run", device="cpu")
    assert len(loaded.encode([BUILT_IN])[0]) < 0.6 * len(BUILT_IN)
    _require_finite(["ruler_vt"], loaded)
