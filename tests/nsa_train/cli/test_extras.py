"""A plain install meets a command that needs more: it is told what to install, without a traceback."""

import subprocess
import sys

import pytest

from tests import fork_server
from tests.nsa_train.train.runs import ROOT, environment


@pytest.mark.parametrize(
    ("missing", "words", "extra"),
    [
        ("olmo_core", ["train", "configs/cpu_quickstart.yaml"], "train"),
        ("numpy", ["data", "stats", "nowhere"], "data"),
        ("transformers", ["export", "hf", "configs", "out"], "hf"),
        ("transformers", ["generate", "configs", "-p", "text"], "hf"),
        ("fastapi", ["serve", "configs"], "serve"),
        ("lm_eval", ["eval", "configs", "--lm-eval", "lambada"], "eval"),
        ("torch", ["doctor"], None),
        ("torch", ["train", "configs/cpu_quickstart.yaml"], None),
    ],
)
def test_a_missing_package_is_named_with_what_installs_it(missing, words, extra):
    code = f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['nsa', *{words!r}]; import nsa_train.cli.__main__"
    if missing in ("fastapi", "lm_eval"):  # not yet imported by the fork server, and nothing else of it matters
        done = fork_server.run(["-c", code], cwd=ROOT, env=environment(), timeout=120)
    else:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 20
    assert f"package {missing}," in done.stderr
    assert f"pip install 'nsa-train{f'[{extra}]' if extra else ''}'" in done.stderr
    assert "Traceback" not in done.stderr


def test_serving_needs_the_extra_serve_alone():
    """Packages of other extras are absent; a model that is missing is what ends the command."""
    others = ["prometheus_client", "olmo_core", "lm_eval", "wandb", "mlflow", "tensorboard"]
    code = f"""import sys
for name in [name for name in sys.modules if name.startswith("nsa_train")]: del sys.modules[name]
sys.modules.update(dict.fromkeys({others!r})); sys.argv = ["nsa", "serve", "nowhere"]; import nsa_train.cli.__main__"""
    done = fork_server.run(["-c", code], cwd=ROOT, env=environment(), timeout=120)
    assert done.returncode == 22, done.stderr
    assert "nowhere" in done.stderr
