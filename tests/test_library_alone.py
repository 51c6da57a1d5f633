"""The library runs with torch alone: no package of the trainer can be imported while it computes and checks."""

import os
import subprocess
import sys

from tests import fork_server

ABSENT = ("nsa_train", "pydantic", "typer", "yaml", "rich", "transformers", "olmo_core", "pyarrow", "tokenizers")
BLOCK = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r}))\n"
FORWARD_AND_BACKWARD = """
import torch
from nsa import NSAAttention

attention = NSAAttention(dim=64, n_heads=4, n_kv_groups=2, d_k=16, d_v=16, l=8, d=4, l_sel=8, n_sel=4, w=16)
x = torch.randn(1, 100, 64, requires_grad=True)
attention(x).sum().backward()
assert x.grad.isfinite().all()
"""
CHECK_AND_BENCH = """
from nsa.bench.__main__ import main as bench
from nsa.check.__main__ import main as check

codes = check(["--heads", "2", "--kv-groups", "1", "--width", "16"]), bench(
    ["decode", "--shape", "tiny", "--lengths", "256", "--budget-s", "0"]
)
assert not any(codes), codes
"""


def test_the_library_needs_torch_only(tmp_path):
    program = BLOCK + FORWARD_AND_BACKWARD + CHECK_AND_BENCH
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "token by token = whole" in done.stdout
    assert "dense SDPA" in done.stdout
    assert "FAILS" not in done.stdout


def test_a_device_that_is_not_here_is_refused_with_the_devices_that_are(tmp_path):
    done = fork_server.run(["-m", "nsa.check", "--device", "nonsense"], cwd=tmp_path, env=os.environ)
    assert (done.returncode, done.stdout) == (20, "")
    assert "nonsense" in done.stderr
    assert "Traceback" not in done.stderr
