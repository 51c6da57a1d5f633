"""Hazards of torch 2.13 that the trainer must not run into; HSDP's double division is in test_parallel.

gloo's scatter is wrong for tensors that are not contiguous, and silently: nothing of ours may scatter weights.
"""

import ast
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from nsa.core.initial_values import fill
from nsa_train.train.engine.mixer import NSAMixerConfig
from tests import fork_server
from tests.attention_options import PHIS, YARN
from tests.nsa_train.train.runs import environment

PACKAGES = Path(__file__).parents[3] / "packages"
SIZES = dict(n_heads=4, n_kv_groups=2, d_k=8, d_v=8, l=8, d=4, l_sel=8, n_sel=4, w=16)


@pytest.fixture
def four_ranks(tmp_path):
    """A world of four in one process, whose collectives carry nothing: only what needs none can be right in it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "options",
    [*(dict(phi=phi) for phi in PHIS),
     dict(kv="shared", qk_norm=True, bias=True, out_bias=True, rope_scaling=YARN, init_std=0.08)],
    ids=[*PHIS, "all_options"],
)  # fmt: skip
def test_sharded_weights_begin_as_their_part_of_the_whole_without_communication(four_ranks, options):
    config = NSAMixerConfig(SIZES | options)
    whole, sharded = (config.build(32, layer_idx=0, n_layers=2) for _ in range(2))
    whole.init_weights(num_blocks=2, generator=torch.Generator().manual_seed(1))
    for name, parameter in list(sharded.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        shard = distribute_tensor(torch.zeros_like(parameter), four_ranks, [Shard(0)], src_data_rank=None)
        setattr(sharded.get_submodule(owner), leaf, torch.nn.Parameter(shard))
    sharded.init_weights(num_blocks=2, generator=torch.Generator().manual_seed(1))
    for name, parameter in whole.named_parameters():
        chunks = parameter.chunk(4)
        mine = chunks[1] if len(chunks) > 1 else parameter[:0]
        assert torch.equal(sharded.get_parameter(name).to_local(), mine), name


def test_weights_that_are_not_contiguous_are_filled_correctly(four_ranks):
    transposed = torch.randn(8, 12).T
    for placement, expected in ((Shard(0), transposed.chunk(4)[1]), (Replicate(), transposed)):
        target = distribute_tensor(torch.zeros(12, 8), four_ranks, [placement], src_data_rank=None)
        fill(target, transposed)
        assert torch.equal(target.to_local(), expected)


@pytest.mark.parametrize("name", ["scatter", "all_gather"])
def test_collectives_that_are_silently_wrong_on_gloo_are_not_used(name):
    """`dist.scatter`, and the differentiable `torch.distributed.nn.functional.all_gather`."""
    for file in PACKAGES.glob("**/*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom | ast.Import):
                text = ast.unparse(node)
                assert "torch.distributed.nn" not in text, file
            if isinstance(node, ast.Call) and name == "scatter":
                assert ast.unparse(node.func) not in ("dist.scatter", "torch.distributed.scatter"), file


def test_gathered_keys_and_mixed_clipping_behave_as_tp_and_cp_assume(tmp_path):
    """Gradients through gathered keys are right only one way, and clipping refuses Tensor beside DTensor."""
    command = ["-m", "tests.nsa_train.train.gathered_keys", str(tmp_path / "store")]
    done = fork_server.run(command, cwd=PACKAGES.parent, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
