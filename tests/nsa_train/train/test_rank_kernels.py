"""All ranks compute with the same kernels, or the run does not start and the odd ranks are named with the reason."""

import socket
import subprocess

import pytest

from nsa.errors import ExitCode, KernelUnavailable
from nsa.kernels.registry import BRANCHES, BackendChoice, PassedOver
from nsa_train.train.host_collectives import HostCollectives, _disagreement, _RankKernels, agree_on_kernels
from tests import fork_server
from tests.nsa_train.train.runs import environment, free_port, write_config

FAST = _RankKernels("node-a", "selected triton", "triton, verified on this GPU", "")
SLOW = _RankKernels("node-b", "selected portable", "portable (triton: there is no C compiler)", "")


def test_a_rank_without_a_compiler_stops_the_start_of_all(tmp_path):
    config, empty = write_config(tmp_path), tmp_path / "no programs"
    empty.mkdir()
    words = ["-m", "nsa_train.cli", "train", str(config), f"train.out_dir={tmp_path}/run", "--steps", "2"]
    port = str(free_port())
    ranks = []
    for rank, more in enumerate(({}, {"PATH": str(empty)})):
        variables = environment(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port, **more,
        )  # fmt: skip
        ranks.append(fork_server.start(words, cwd=tmp_path, env=variables, stderr=subprocess.PIPE))
    for process in ranks:
        errors = process.stderr.read()
        assert process.wait() == ExitCode.CONFIG, errors
        assert f"rank 1 on {socket.gethostname()}: portable" in errors
        assert "no C++ compiler" in errors
        assert "cpu (C++)" in errors
    assert not list((tmp_path / "run").glob("step*"))


def test_ranks_that_agree_are_not_refused():
    assert _disagreement([FAST, FAST._replace(host="node-b", why="triton, requested by name")]) is None


def test_the_odd_ranks_are_named_with_their_reason():
    text = _disagreement([SLOW, FAST, FAST, SLOW, FAST])
    assert "rank 0 on node-b, rank 3 on node-b: portable (triton: there is no C compiler)" in text
    assert "The other 3: triton, verified on this GPU" in text
    many = _disagreement([FAST] * 20 + [SLOW] * 10)
    assert "rank 27 on node-b, …" in many


def test_a_backend_that_one_rank_cannot_run_is_said_by_all():
    broken = _RankKernels("node-c", "", "", "kernels.selected='triton' cannot run here: there is no C compiler")
    assert _disagreement([FAST, broken]) == f"rank 1 on node-c: {broken.problem}"
    assert _disagreement([broken]) == broken.problem


def test_a_process_alone_returns_its_choices_and_its_error():
    choices = tuple(BackendChoice(branch, "portable", (PassedOver("cpu", "no"),)) for branch in BRANCHES)
    alone = HostCollectives(60.0)
    assert agree_on_kernels(lambda: choices, alone) == choices

    def refuse():
        raise KernelUnavailable("kernels.selected='triton' cannot run here")

    with pytest.raises(KernelUnavailable, match=r"^kernels\.selected"):
        agree_on_kernels(refuse, alone)
