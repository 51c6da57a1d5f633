"""`nsa train` on a pretended GPU: where the host waits for the device, step by step."""

from collections import Counter
from unittest import mock

import pytest
import torch

from nsa_train.config import load
from nsa_train.train import build_run, run
from nsa_train.train.engine import Callback
from nsa_train.train.start_options import StartOptions
from tests.nsa_train.train.pretend_cuda import PretendedCuda, on_pretended_cuda, pretended_cuda
from tests.nsa_train.train.runs import BASE
from tests.nsa_train.train.test_resume import corpus  # noqa: F401

STEPS, LOG_EVERY = 9, 4
AT_A_LOG_STEP = {
    "nsa_train/train/callbacks/heartbeat_callback.py _values": "aten._local_scalar_dense.default",
    "nsa_train/train/engine/nan_guard.py read": "event",
}


class StepWaits(Callback):
    """The host waits of each step, after everything else has run."""

    priority = -1000

    def __init__(self, device: PretendedCuda) -> None:
        self.device, self.by_step = device, dict[int, Counter]()

    def post_step(self) -> None:
        self.by_step[self.step] = Counter(map(str, self.device.waits))
        self.device.waits.clear()


@pytest.fixture(scope="module", params=["plain", "packed"])
def waits(request, tmp_path_factory, corpus):  # noqa: F811
    folder = tmp_path_factory.mktemp("waits")
    (folder / "run.yaml").write_text(BASE)
    data = ["data.dataset=local", f"data.path={corpus}"] if request.param == "packed" else []
    settings = [f"train.out_dir={folder}/run", f"train.steps={STEPS}", f"train.log_every={LOG_EVERY}", *data]
    config = load(folder / "run.yaml", overrides=settings)
    built, trainer = build_run.build_train_module, build_run.build_trainer
    with pretended_cuda() as device:
        steps = StepWaits(device)

        def on_device(config, vocab_size, ranks, _):
            module = built(config, vocab_size, ranks, torch.device("cpu"))
            on_pretended_cuda(module)
            return module

        def listening(*parts):
            *others, callbacks = parts
            return trainer(*others, {**callbacks, "waits": steps})

        with (
            mock.patch.object(build_run, "build_train_module", on_device),
            mock.patch.object(build_run, "build_trainer", listening),
        ):
            assert run.train(config, StartOptions()) == 0
    return steps.by_step


def test_no_step_waits_between_log_steps(waits):
    logged = {1, *range(LOG_EVERY, STEPS + 1, LOG_EVERY), STEPS}
    between = {step: sorted(operators) for step, operators in waits.items() if step not in logged}
    assert between == {step: [] for step in range(1, STEPS + 1) if step not in logged}


def test_log_steps_wait_where_they_read(waits):
    """These waits are seen, so a wait between log steps would be, too."""
    places = {tuple(wait.split(" at ")) for wait in waits[LOG_EVERY]}
    assert places == {(operator, where) for where, operator in AT_A_LOG_STEP.items()}
