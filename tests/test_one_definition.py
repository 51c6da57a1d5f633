"""An option of the attention, a pooling operator, a metric of a run and a health condition are written once: a copy of
the tree with a new one has it everywhere. The number of source files that a patch touches is the measure."""

import ast
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from nsa.core.attention_config import OPTIONS, AttentionConfig
from nsa.option_fields import options_of

ROOT = Path(__file__).parents[1]
LIBRARY, TRAINER = PACKAGES = ROOT / "packages/nsa-attention/nsa", ROOT / "packages/nsa-train/nsa_train"
MOST_FILES_OF_AN_OPTION, MOST_FILES_OF_A_PHI, MOST_FILES_OF_A_METRIC, MOST_FILES_OF_A_CONDITION = 3, 2, 2, 2

OPTION = {
    "nsa/core/attention_config.py": (
        "    blocks: SelectorBlocks = option(",
        "    heads_per_page: int = option(\n"
        '        4, "Heads of one page.", name="max_heads_per_page", unit="heads", at_least=1, may_change=True\n'
        "    )\n"
        "    blocks: SelectorBlocks = option(",
    ),
    "nsa/core/nsa_attention.py": (
        "        self.rope_compressed = c.compression.rotated\n",
        "        self.rope_compressed = c.compression.rotated\n"
        "        self.pages = -(-c.n_heads // c.selector.heads_per_page)\n",
    ),
}
USE_OF_THE_OPTION = """
from tools.docs.setting_pages import PAGES
from nsa_train.config.schema import RunConfig, settings
from nsa.core.nsa_attention import NSAAttention
from nsa.errors import ConfigError
from nsa_train.convert.export_folder import exported_config, model_settings
from nsa.hf.configuration import NSAConfig
from nsa_train.infer.evaluation.layer_harm import _OF_SPARSE_LAYERS
from nsa_train.run_model import build_model

sizes = dict(dim=16, n_heads=6, n_kv_groups=1, d_k=4, d_v=4)
assert NSAAttention(**sizes).pages == 2
assert NSAAttention(**sizes, max_heads_per_page=2).pages == 3
try:
    NSAAttention(**sizes, max_heads_per_page=0)
    raise SystemExit("a value below its limit was accepted")
except ConfigError as error:
    assert "max_heads_per_page (0)" in str(error), error
run = RunConfig.model_validate(
    {"nsa": {"max_heads_per_page": 3}, "model": {"dim": 16, "n_layers": 1, "n_heads": 6, "d_k": 4, "d_v": 4}}
)
assert run.attention.selector.heads_per_page == 3
assert build_model(run, 8).blocks[0].attention.pages == 2
exported = exported_config(run, 8, None)
again = NSAConfig.from_dict(exported.to_dict())
assert again.max_heads_per_page == 3 and again.attention_config() == run.attention
assert RunConfig.model_validate(model_settings(again)).nsa.max_heads_per_page == 3
row = next(line for line in PAGES["docs/CONFIG.md"]().splitlines() if "`nsa.max_heads_per_page`" in line)
assert row == "| `nsa.max_heads_per_page` | a whole number ≥ 1 | `4` | heads | may change | Heads of one page. |", row
assert "max_heads_per_page" in _OF_SPARSE_LAYERS
"""
USE_OF_THE_OPTION_BY_THE_ENGINE = """
from nsa_train.config.schema import RunConfig
from nsa_train.train.engine.mixer import NSAMixerConfig

run = RunConfig.model_validate({"nsa": {"max_heads_per_page": 3}})
mixer = NSAMixerConfig.of_run(run)
assert NSAMixerConfig.from_dict(mixer.as_config_dict()) == mixer
assert mixer.build(768, layer_idx=0, n_layers=1, init_device="meta").layer.pages == 4
"""
PHI = {
    "nsa/core/pooling.py": (
        '    "mlp": PoolingOperator(',
        '    "last": PoolingOperator(\n'
        "        pool=lambda phi, block, raw, begin: block[:, :, -1] * phi.weight('w_last', block.dtype),\n"
        "        parameters=lambda l, width: {\n"
        "            'w_last': PoolingParameter((width,), lambda w: w.fill_(1), decays=False)\n"
        "        },\n"
        "        flops=lambda l, width: width,\n"
        "        needs_unrotated_keys=True,\n"
        "    ),\n"
        '    "mlp": PoolingOperator(',
    ),
}
USE_OF_THE_PHI = """
import torch
from tools.docs.setting_pages import PAGES
from nsa_train.config.schema import RunConfig
from nsa.core.pooling import undecayed_parameters
from nsa.errors import ConfigError
from nsa_train.convert.export_folder import exported_config
from nsa.hf.configuration import NSAConfig
from nsa_train.run_model import build_model
from nsa_train.planning.activations import ForwardPass, activations
from nsa_train.planning.model_figures import model_figures

sections = {"nsa": {"phi": "last", "w": 8}, "model": {"dim": 16, "n_layers": 1, "n_heads": 2, "d_k": 4, "d_v": 4}}
run = RunConfig.model_validate(sections)
assert run.nsa.rope_compressed == "after"
model = build_model(run, 8)
tokens = torch.arange(80)[None] % 8
model(tokens).sum().backward()
assert model.blocks[0].attention.phi_v.w_last.grad.any()
assert exported_config(run, 8, None).attention_config().compression.phi == "last"
assert "w_last" in undecayed_parameters() and "weighted, softmax, linear, last, mlp" in PAGES["docs/CONFIG.md"]()
figures = model_figures(run, 8)
attention = model.blocks[0].attention
assert figures.parameters.attention == sum(p.numel() for p in attention.parameters())
assert attention.flops(80)["compression"] == 2 * 2 * 4 * 4 / 80  # entries, streams, groups, channels
one = ForwardPass(1, 80, 8, autocast=False, width=4, on_gpu=False)
assert activations(run, one, figures.parameters.products_per_layer, figures.parameters.head_weights).kept > 0
for broken in ({"phi_pos_emb": True}, {"rope_compressed": "before"}):
    try:
        RunConfig.model_validate({"nsa": {**sections["nsa"], **broken}})
        raise SystemExit(f"{broken} was accepted")
    except ValueError as error:
        assert "nsa.phi (last)" in str(error), error
"""
METRIC = {
    "nsa_train/record/heartbeat_record.py": (
        "    gpu_mem_alloc: float | None = _field(",
        "    open_files: int | None = _field(\n"
        '        "Files that the process has open.", unit="files", title="open files", format=MetricFormat.COUNT,\n'
        '        gauge="nsa_open_files",\n'
        "    )\n"
        "    gpu_mem_alloc: float | None = _field(",
    ),
    "nsa_train/train/callbacks/heartbeat_callback.py": (
        '            "host_mem_rss": _resident_mib(),\n',
        '            "host_mem_rss": _resident_mib(), "open_files": len(os.listdir("/proc/self/fd")),\n',
    ),
}
USE_OF_THE_METRIC = f"""
import runpy
from pathlib import Path
from nsa_train import names
from nsa_train.watch.exporter import HELP, samples
from nsa_train.record.heartbeat_record import HeartbeatRecord, read_beats
from nsa_train.record.record_files import JsonLines
from nsa_train.train.metric_writers import TRAINING_COLUMNS, tracked_numbers
from nsa_train.watch.view.monitor_frame import frame
from nsa_train.watch.view.run_report import render as report, render_comparison as compare
from nsa_train.watch.run_reader import ClockReading, load
from nsa_train.watch.view.summary import take_snapshot
from nsa_train.watch.history import RunHistory
from nsa_train.watch.conditions import HealthLimits
from tools.docs.reference_pages import heartbeat_page

run = Path("run")
lines = JsonLines(run / names.heartbeat(0))
for step in range(1, 9):
    beat = HeartbeatRecord.now(ts=1e9 + step, rank=0, step=step, msg=names.PROGRESS, loss=2.0, open_files=1200 + step)
    lines.append(beat.to_line())
lines.close()
assert [beat.open_files for beat in read_beats(run / names.heartbeat(0))] == list(range(1201, 1209))
assert "open_files" in TRAINING_COLUMNS and tracked_numbers(beat)["train/open_files"] == 1208
history = RunHistory()
history.add(beat, beat.ts)
scraped = samples(history, ClockReading(beat.ts, beat.ts), set(), HealthLimits())
served = {{sample.name: sample.value for sample in scraped}}
assert "nsa_open_files" in HELP and served["nsa_open_files"] == 1208
row = "| `open_files` | whole number | files | Files that the process has open. |"
assert row in heartbeat_page().splitlines()
assert any("open files 1,208" in line.plain for line in frame(take_snapshot(run), 120, 60))
assert "open files" in report(take_snapshot(run)) and "open files" in compare([load(run), load(run)])
dashboard = runpy.run_path({str(ROOT / "ops/grafana/make_dashboard.py")!r})["text"]()
assert "nsa_open_files" in dashboard
"""
USE_OF_THE_METRIC_BY_THE_CALLBACK = """
from types import SimpleNamespace
import torch
from nsa_train.record.heartbeat_record import HeartbeatRecord
from nsa_train.train.callbacks.heartbeat_callback import HeartbeatCallback

values = HeartbeatCallback._memory(SimpleNamespace(trainer=SimpleNamespace(device=torch.device("cpu"))))
assert HeartbeatRecord.now(ts=0.0, rank=0, step=1, msg="progress", **values).metrics()["open_files"] > 2
"""
CONDITION = {
    "nsa_train/watch/conditions.py": (
        "_CONDITIONS = (\n",
        "_CONDITIONS = (\n"
        '    HealthCondition("lr_zero", _W, "lr", "learning rate of 0 for {gate_records} records",\n'
        '                    "check train.lr_schedule", alert_for_s=_WARNING_FOR_S),\n',
    ),
    "nsa_train/watch/health.py": (
        "        yield from _memory(log, limits)\n",
        "        yield from _memory(log, limits)\n"
        "        if all(beat.lr == 0 for beat in list(log.progress)[-limits.gate_records :]):\n"
        '            yield "lr_zero", "learning rate 0"\n',
    ),
}
USE_OF_THE_CONDITION = """
import yaml
from nsa_train.record.heartbeat_record import HeartbeatRecord
from nsa_train.watch.conditions import HealthLimits, alert_rules
from nsa_train.watch.health import examine
from nsa_train.watch.history import RunHistory
from tools.docs.runbook_table import table

history = RunHistory()
for step in range(1, 5):
    history.add(HeartbeatRecord.now(ts=float(step), rank=0, step=step, msg="progress", loss=1.0, lr=0.0), float(step))
assert [finding.name for finding in examine(history, now=5.0, limits=HealthLimits())] == ["lr_zero"]
rules = {rule["alert"]: rule for group in yaml.safe_load(alert_rules())["groups"] for rule in group["rules"]}
assert 'nsa_findings{condition="lr_zero"} > 0' in rules["NSALrZero"]["expr"] and rules["NSALrZero"]["for"] == "300s"
assert rules["NSALrZero"]["annotations"]["summary"].endswith("learning rate of 0 for 3 records")
assert any("`lr_zero`" in row and "check train.lr_schedule" in row for row in table().splitlines())
"""


def patched_tree(folder: Path, patch: dict[str, tuple[str, str]]) -> Path:
    for package in PACKAGES:
        left_out = shutil.ignore_patterns("*.pyc.*", "*.cpp", "*.so")  # byte code that another test is writing
        shutil.copytree(package, folder / package.name, ignore=left_out, symlinks=True)
    for name, (old, new) in patch.items():
        file = folder / name
        text = file.read_text(encoding="utf-8")
        assert text.count(old) == 1, name
        file.write_text(text.replace(old, new), encoding="utf-8")
    return folder


def run_in(tree: Path, program: str) -> None:
    paths = f"import sys; sys.path.insert(0, {str(tree)!r}); sys.path.append({str(ROOT)!r})"  # ROOT: for tools
    check = f"{paths}\nimport nsa; assert {str(tree)!r} in nsa.__file__\n"
    environment = {"NSA_KERNEL": "portable", "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", check + program], cwd=tree, capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_an_option_reaches_settings_module_export_import_pages_and_engine(tmp_path):
    pytest.importorskip("transformers", reason="Transformers is in the hf extra")
    assert len(OPTION) <= MOST_FILES_OF_AN_OPTION
    by_the_engine = USE_OF_THE_OPTION_BY_THE_ENGINE if find_spec("olmo_core") else ""  # it is in the train extra
    run_in(patched_tree(tmp_path, OPTION), USE_OF_THE_OPTION + by_the_engine)


def test_a_phi_is_one_row(tmp_path):
    pytest.importorskip("transformers", reason="Transformers is in the hf extra")
    assert len(PHI) <= MOST_FILES_OF_A_PHI
    run_in(patched_tree(tmp_path, PHI), USE_OF_THE_PHI)


@pytest.fixture(scope="module")
def with_metric(tmp_path_factory) -> Path:
    return patched_tree(tmp_path_factory.mktemp("metric"), METRIC)


def test_a_metric_reaches_every_reader(with_metric):
    assert len(METRIC) <= MOST_FILES_OF_A_METRIC
    run_in(with_metric, USE_OF_THE_METRIC)


def test_a_metric_is_recorded_by_the_callback(with_metric):
    pytest.importorskip("olmo_core", reason="the engine is in the train extra")
    run_in(with_metric, USE_OF_THE_METRIC_BY_THE_CALLBACK)


def test_a_health_condition_is_a_row_and_a_check(tmp_path):
    assert len(CONDITION) <= MOST_FILES_OF_A_CONDITION
    run_in(patched_tree(tmp_path, CONDITION), USE_OF_THE_CONDITION)


def test_no_other_source_lists_the_options():
    """A file that spells many of them is a second definition, which will forget one."""
    names = {each.name for each in OPTIONS if len(each.name) > 2}
    sources = {
        file: ast.parse(file.read_text(encoding="utf-8")) for package in PACKAGES for file in package.rglob("*.py")
    }
    definitions = {LIBRARY / "core/attention_config.py", LIBRARY / "geometry.py"}
    for file, tree in sources.items():
        spelled = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        spelled |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword)}
        spelled |= {node.target.id for node in ast.walk(tree)
                    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}  # fmt: skip
        if file not in definitions:
            assert len(names & spelled) < len(names) / 2, file


def test_every_option_is_described_and_every_field_is_an_option():
    assert [each.name for each in OPTIONS] == [each.name for each in options_of(AttentionConfig)]
    for each in OPTIONS:
        assert each.about.endswith("."), each.name
    config = AttentionConfig(dim=8, n_heads=2, n_kv_groups=1, d_k=4, d_v=4)
    assert config.changed(**config.options()) == config
