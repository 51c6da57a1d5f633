"""Templates that cannot run here are checked against schemas, each other and our commands; all shell by shellcheck."""

import re
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from nsa.errors import ExitCode
from nsa_train.cli.main import app
from nsa_train.config import load
from nsa_train.shipped import CONFIGS, config_names
from nsa_train.train.launch.launcher import FINAL_EXITS, RETRYABLE_EXITS
from tests.docs.blocks import tokenizer_command
from tests.nsa_train.train.runs import ROOT
from tests.ops.needs import programs

JOBSET = ROOT / "ops/kubernetes/jobset.yaml"
SKY = ROOT / "ops/skypilot/train.yaml"
CLAIM, SET = yaml.safe_load_all(JOBSET.read_text())
TASK = yaml.safe_load(SKY.read_text())
JOB = SET["spec"]["replicatedJobs"][0]["template"]["spec"]
POD = JOB["template"]["spec"]
CONTAINER = POD["containers"][0]

SCRIPTS = [
    *ROOT.glob(".ci/[inrs]*"), *ROOT.glob("scripts/**/*.sh"), *ROOT.glob("tests/**/*.sh"),
    *ROOT.glob("ops/**/*.sh"), *ROOT.glob("ops/**/*.sbatch"),
]  # fmt: skip
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in SCRIPTS} | {
    "jobset.yaml": f"#!/usr/bin/env bash\n{CONTAINER['command'][2]}",
    "skypilot setup": f"#!/usr/bin/env bash\n{TASK['setup']}",
    "skypilot run": f"#!/usr/bin/env bash\n{TASK['run']}",
}


@pytest.mark.parametrize("name", TEXTS)
def test_shellcheck_finds_nothing(name):
    tools = programs("shellcheck", "bash")
    for command in ([tools["bash"], "-n"], [tools["shellcheck"], "--severity=warning", "-"]):
        done = subprocess.run(command, input=TEXTS[name], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", [name for name in TEXTS if "nsa " in TEXTS[name]])
def test_our_commands_have_the_options_they_are_called_with(name):
    text = re.sub(r"^\s*#.*$", "", TEXTS[name], flags=re.MULTILINE).replace("\\\n", " ")
    calls = re.findall(r"\bnsa ((?:[a-z]+(?:-[a-z]+)* ?)+)([^;|&\n]*)", text)
    for words, rest in calls:
        command = typer.main.get_command(app)
        for word in words.split():
            command = getattr(command, "commands", {}).get(word, command)
        assert not hasattr(command, "commands"), f"nsa {words}is no command"
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"(?<=\s)--[a-z-]+", f" {rest}")) <= known


def test_templates_that_were_not_run_say_so_first():
    for path in (JOBSET, SKY):
        assert "NOT RUN" in "".join(path.read_text().splitlines(keepends=True)[:4]), path


# Fields of JobSet (v1alpha2), batch/v1, core/v1 and SkyPilot's task, as far as the templates use them: a type, a
# list of one shape, a dict of fields, or a set of allowed words.
_METADATA = {"name": str}
_ENV = {"name": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath": str}}}
_CONTAINER = {
    "name": str, "image": str, "env": [_ENV], "command": [str], "args": [str],
    "resources": {"limits": {"nvidia.com/gpu": int}}, "volumeMounts": [{"name": str, "mountPath": str}],
}  # fmt: skip
_VOLUME = {
    "name": str,
    "persistentVolumeClaim": {"claimName": str},
    "emptyDir": {"medium": {"Memory"}, "sizeLimit": str},
}
_POD = {
    "restartPolicy": {"Never", "OnFailure"}, "terminationGracePeriodSeconds": int, "containers": [_CONTAINER],
    "volumes": [_VOLUME],
}  # fmt: skip
_FAILURE = {
    "action": {"FailJob", "Ignore", "Count", "FailIndex"},
    "onExitCodes": {"containerName": str, "operator": {"In", "NotIn"}, "values": [int]},
}
_JOB = {
    "parallelism": int, "completions": int, "completionMode": {"Indexed"}, "backoffLimit": int,
    "podFailurePolicy": {"rules": [_FAILURE]},
    "template": {"spec": _POD},
}  # fmt: skip
_RULE = {
    "name": str,
    "action": {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"},
    "onJobFailureReasons": [{"PodFailurePolicy", "BackoffLimitExceeded", "DeadlineExceeded"}],
}
JOBSET_SHAPE = {
    "apiVersion": {"jobset.x-k8s.io/v1alpha2"}, "kind": {"JobSet"}, "metadata": _METADATA,
    "spec": {
        "network": {"enableDNSHostnames": bool, "subdomain": str, "publishNotReadyAddresses": bool},
        "failurePolicy": {
            "maxRestarts": int, "restartStrategy": {"Recreate", "BlockingRecreate"}, "rules": [_RULE],
        },
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": _JOB}}],
    },
}  # fmt: skip
CLAIM_SHAPE = {
    "apiVersion": {"v1"}, "kind": {"PersistentVolumeClaim"}, "metadata": _METADATA,
    "spec": {"accessModes": [{"ReadWriteMany"}], "resources": {"requests": {"storage": str}}},
}  # fmt: skip
TASK_SHAPE = {
    "name": str, "workdir": str, "envs": dict, "setup": str, "run": str,
    "resources": {
        "accelerators": dict, "use_spot": bool, "disk_size": int,
        "job_recovery": {"recover_on_exit_codes": [int], "max_restarts_on_errors": int},
    },
}  # fmt: skip


def misfits(value, shape, at=""):
    """Yield where a document does not have the shape: unknown fields, wrong types, words that do not exist."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return [f"{at} is no mapping"]
        unknown = [f"{at}.{name} is unknown" for name in value.keys() - shape.keys()]
        return unknown + [
            misfit
            for name in value.keys() & shape.keys()
            for misfit in misfits(value[name], shape[name], f"{at}.{name}")
        ]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{at} is no list"]
        return [misfit for i, item in enumerate(value) for misfit in misfits(item, shape[0], f"{at}[{i}]")]
    if isinstance(shape, set):
        return [] if value in shape else [f"{at} is {value!r}, not one of {sorted(shape)}"]
    return [] if type(value) is shape else [f"{at} is {value!r}, not {shape.__name__}"]


@pytest.mark.parametrize(
    ("document", "shape"), [(SET, JOBSET_SHAPE), (CLAIM, CLAIM_SHAPE), (TASK, TASK_SHAPE)], ids=["set", "claim", "sky"]
)
def test_fields_and_types_are_those_of_the_schema(document, shape):
    assert misfits(document, shape) == []


def test_a_misspelt_field_and_a_wrong_type_are_found():
    assert misfits({"kind": "JobSet", "spek": {}}, JOBSET_SHAPE) == [".spek is unknown"]
    assert misfits({"spec": {"failurePolicy": {"maxRestarts": "3"}}}, JOBSET_SHAPE) == [
        ".spec.failurePolicy.maxRestarts is '3', not int"
    ]


def test_parts_of_the_jobset_refer_to_each_other_by_their_names():
    env = {entry["name"]: entry.get("value") for entry in CONTAINER["env"]}
    name, job = SET["metadata"]["name"], SET["spec"]["replicatedJobs"][0]["name"]
    assert env["MEETING"].partition(":")[0] == f"{name}-{job}-0-0.{SET['spec']['network']['subdomain']}"
    assert str(JOB["parallelism"]) == str(JOB["completions"]) == env["NODES"]
    assert f"--nproc {CONTAINER['resources']['limits']['nvidia.com/gpu']} " in CONTAINER["command"][2]
    assert POD["terminationGracePeriodSeconds"] > int(env["GRACE"])
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == volumes.keys()
    assert volumes["runs"]["persistentVolumeClaim"]["claimName"] == CLAIM["metadata"]["name"]
    out_dir = next(word for word in CONTAINER["args"] if word.startswith("train.out_dir=")).partition("=")[2]
    assert out_dir.startswith(CONTAINER["volumeMounts"][0]["mountPath"] + "/")
    assert POD["restartPolicy"] == "Never", "podFailurePolicy demands it"


def test_a_failure_that_needs_a_person_is_not_restarted_and_a_preemption_is():
    codes = JOB["podFailurePolicy"]["rules"][0]["onExitCodes"]
    assert codes["containerName"] == CONTAINER["name"]
    saved_to_continue = {ExitCode.PREEMPTED, ExitCode.REGROUP}
    assert codes["values"] == sorted((FINAL_EXITS.keys() | RETRYABLE_EXITS.keys()) - saved_to_continue), (
        "ordered, as Kubernetes demands"
    )
    assert TASK["resources"]["job_recovery"]["recover_on_exit_codes"] == [ExitCode.PREEMPTED]


def test_slurm_warns_early_enough_for_a_save():
    text = (ROOT / "ops/slurm/train.sbatch").read_text()
    (warning,) = re.findall(r"^#SBATCH --signal=B:USR1@(\d+)$", text, flags=re.MULTILINE)
    (grace,) = re.findall(r"^GRACE=\$\{GRACE:-(\d+)\}$", text, flags=re.MULTILINE)
    assert int(warning) > int(grace)


def test_configs_and_settings_of_the_templates_load():
    config, *changes = CONTAINER["args"]
    assert load(ROOT / config, overrides=changes).train.out_dir == "/runs/train"
    assert load(ROOT / TASK["envs"]["CONFIG"], overrides=["parallel.data=fsdp"]).parallel.data == "fsdp"


WITH_A_TOKENIZER = {
    "ops/slurm/train.sbatch",
    "ops/kubernetes/jobset.yaml",
    "ops/skypilot/train.yaml",
    "docs/RUNBOOK.md",
    "docs/GENERATE.md",
}


def needs_a_tokenizer(config: str) -> bool:
    return load(CONFIGS / f"{config}.yaml").data.tokenizer != "byte"


@pytest.mark.parametrize("name", sorted(WITH_A_TOKENIZER))
def test_a_text_that_starts_a_config_says_how_its_tokenizer_is_made(name):
    """One command, the one in the config's own header: without that file preflight refuses the run."""
    named = set(re.findall(rf"\b(?:{'|'.join(config_names())})\b", (ROOT / name).read_text()))
    needing = [CONFIGS / f"{config}.yaml" for config in named if needs_a_tokenizer(config)]
    assert needing
    for path in needing:
        assert tokenizer_command(ROOT / name) == tokenizer_command(path)


def test_no_other_text_for_operators_starts_a_config_that_needs_a_tokenizer():
    texts = [*ROOT.glob("ops/**/*.*"), *ROOT.glob("docs/*.md"), *ROOT.glob("scripts/**/*.sh")]
    with_bytes = r"(?![^\n]*data\.tokenizer=byte)"
    config_name = rf"(?:configs/)?({'|'.join(config_names())})(?:\.yaml)?(?!\w)"
    starts = rf"(?:launch\b|train\b|sbatch\S*|start HOST|CONFIG:|args:\n *-)[^\n]* {config_name}{with_bytes}"
    operator_texts = {
        str(path.relative_to(ROOT))
        for path in texts
        if path.is_file() and path.suffix != ".pyc"
        for config in re.findall(starts, path.read_text(encoding="utf-8"))
        if needs_a_tokenizer(config)
    }
    assert operator_texts == WITH_A_TOKENIZER


def test_skypilot_uploads_the_tokenizer_with_the_project():
    """It leaves out what .gitignore names."""
    folder = load(ROOT / TASK["envs"]["CONFIG"]).data.tokenizer.partition("/")[0]
    assert not any(line.strip("/") in (folder, "*.json") for line in (ROOT / ".gitignore").read_text().splitlines())


class StandIn:
    """An `nsa` that writes down how it was called and ends as told, to see what the shell around it does."""

    def __init__(self, at: Path) -> None:
        self.at = at
        (at / "bin").mkdir()
        (at / ".venv/bin").mkdir(parents=True)
        (at / ".venv/bin/activate").touch()
        (at / "bin/nsa").write_text(
            f'#!/bin/sh\necho "$@" >>{at}/calls\n'
            'case $1 in preflight) exit "${PREFLIGHT_CODE:-0}" ;; launch) mkdir -p "$RUN/checkpoints/latest"; exit '
            '"${LAUNCH_CODE:-0}" ;; esac\n'
            'case $2 in pull) [ "$PULL_FINDS" = 0 ] || mkdir -p "$RUN/checkpoints/latest"; exit "$PULL_CODE" ;; esac\n'
        )
        (at / "bin/nsa").chmod(0o755)

    def run(self, command: list[str], **variables: str) -> int:
        env = {"PATH": f"{self.at}/bin:/usr/bin:/bin", "RUN": str(self.at / "run"), **variables}
        return subprocess.run(command, env=env, cwd=self.at, capture_output=True, timeout=60).returncode

    def calls(self) -> list[str]:
        return [" ".join(line.split()[:2]) for line in (self.at / "calls").read_text().splitlines()]


@pytest.mark.parametrize(
    ("life", "index", "preflight", "calls", "code"),
    [
        ("0", "0", "0", ["preflight --resume", "launch --resume"], 10),
        ("0", "0", "20", ["preflight --resume"], 20),
        ("0", "1", "0", ["launch --resume"], 10),
        ("1", "0", "0", ["launch --resume"], 10),
    ],
)
def test_a_pod_checks_once_and_ends_with_the_code_of_the_launcher(tmp_path, life, index, preflight, calls, code):
    stand_in = StandIn(tmp_path)
    env = {entry["name"]: entry["value"] for entry in CONTAINER["env"] if "value" in entry}
    stub_variables = dict(LIFE=life, JOB_COMPLETION_INDEX=index, PREFLIGHT_CODE=preflight, LAUNCH_CODE="10")
    assert stand_in.run([*CONTAINER["command"], *CONTAINER["args"]], **env, **stub_variables) == code
    assert stand_in.calls() == calls


@pytest.mark.parametrize(
    ("pull", "finds", "calls", "code"),
    [
        ("0", "1", ["checkpoint pull", "launch --resume", "checkpoint push"], 10),
        ("0", "0", ["checkpoint pull", "preflight --resume", "launch --resume", "checkpoint push"], 10),
        ("22", "0", ["checkpoint pull"], 22),  # only damaged checkpoints
        ("1", "0", ["checkpoint pull"], 1),  # unreachable
    ],
)
def test_a_spot_node_continues_from_the_bucket_and_never_starts_anew_by_mistake(tmp_path, pull, finds, calls, code):
    stand_in = StandIn(tmp_path)
    env = {**TASK["envs"], "BUCKET": "s3://b", "RUN": str(tmp_path / "run"), "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    stub_variables = dict(PULL_CODE=pull, PULL_FINDS=finds, LAUNCH_CODE="10")
    assert stand_in.run(["bash", "-c", TASK["run"]], **{**env, **stub_variables}) == code
    assert stand_in.calls() == calls


def test_a_spot_node_without_a_bucket_is_refused(tmp_path):
    assert StandIn(tmp_path).run(["bash", "-c", TASK["run"]], **TASK["envs"]) == 20
