"""Simulates a step (`train.engine.simulated_rank`) in a child process: an abort of torch ends the child alone.

As a program this module is that child: a request as JSON on stdin, JSON lines on stdout.
"""

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from nsa.errors import ConfigError, NSAError
from nsa_train.config.schema import RunConfig
from nsa_train.planning.step_counts import StepCounts
from nsa_train.train.child_messages import last_line, message_sender

SIMULATION_S = 600.0


@dataclass(frozen=True)
class SimulationRequest:
    """The arguments of `simulate_step`."""

    config: dict[str, Any]
    vocab_size: int
    world: int
    local_world: int
    all_layers: bool = False
    kernel_workspace: int = 0


class SimulationFailed(NSAError):
    """The simulated step could not be computed."""


def simulate_in_child(
    request: SimulationRequest, log: Callable[[str], None] = lambda text: None, *, time_s: float = SIMULATION_S
) -> StepCounts:
    """Counts of one step; progress goes to `log`. Raises `SimulationFailed` with the reason, also for a time limit."""
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "nsa_train.train.simulation_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        timer = threading.Timer(time_s, child.kill)
        timer.start()
        result = None
        try:
            with child.stdin as stdin:
                stdin.write(json.dumps(asdict(request)))
            for line in child.stdout:
                message = json.loads(line)
                if "log" in message:
                    log(message["log"])
                elif "refused" in message:
                    raise ConfigError(message["refused"])
                else:
                    result = StepCounts.from_json(message["counts"])
            child.wait()
        finally:
            expired = not timer.is_alive()
            timer.cancel()
            child.kill()
            child.wait()
            child.stdout.close()
        if result is not None:
            return result
        if expired:
            raise SimulationFailed(f"the simulated step took more than {time_s:.0f} s. Simulate fewer layers.")
        raise SimulationFailed(f"the simulated step ended with exit code {child.returncode}: {last_line(errors)}")


def _main() -> None:
    request = SimulationRequest(**json.load(sys.stdin))
    with message_sender() as send:
        from nsa_train.train.engine.simulated_rank import simulate_step

        try:
            counts = simulate_step(
                RunConfig.model_validate(request.config),
                request.vocab_size,
                request.world,
                request.local_world,
                all_layers=request.all_layers,
                kernel_workspace=request.kernel_workspace,
                log=lambda text: send(log=text),
            )
        except ConfigError as error:
            send(refused=str(error))
        else:
            send(counts=counts.as_json())


if __name__ == "__main__":
    _main()
