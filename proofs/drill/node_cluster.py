"""A run on three nodes of one machine for drill scenarios: `nsa launch` on each, and what a fault cost the run."""

import time
from itertools import pairwise

from nsa_train.record.events import EventKind, RunEvent
from proofs.drill import artifacts
from proofs.drill.harness import DrillHarness, DrillProcess, NotObserved
from proofs.drill.node_network import NetworkNode, NodeNetwork
from proofs.drill.result import DrillResult

NODES = 3
NODE_STEPS = 60
TIMEOUT_S = 20.0
"""parallel.timeout_s of these runs."""
TOLERANCE = 1e-4
"""Largest difference of a loss or weight between runs on different numbers of ranks."""
_PORT = 29500
SETTINGS = (
    "train.batch_size=6",
    "train.save_every=10",
    "train.keep_checkpoints=100",
    "parallel.data=fsdp",
    f"parallel.timeout_s={TIMEOUT_S:g}",
)


class NodeCluster:
    """Nodes with `nsa launch` on each, until the scenario ends."""

    def __init__(
        self, harness: DrillHarness, nnodes: str = str(NODES), steps: int = NODE_STEPS, count: int = NODES
    ) -> None:
        self._harness, self._nnodes, self._steps = harness, nnodes, steps
        self._settings = (*SETTINGS, f"train.steps={steps}")
        network = NodeNetwork(harness.folder, count)
        harness.at_end(network.close)
        self.nodes = network.__enter__().nodes
        self._launchers: dict[str, DrillProcess] = {}
        for node in self.nodes:
            self.launch(node)

    def launch(self, node: NetworkNode) -> None:
        """Start the launcher on a node: the same command, without --resume, at first and after a reboot."""
        words = ("--nproc", "1", "--nnodes", self._nnodes, "--rdzv-endpoint", f"{self.nodes[0].name}:{_PORT}")
        arguments = self._harness.arguments(self._settings)
        self._launchers[node.name] = self._harness.start("nsa_train.cli", "launch", *words, *arguments, node=node)

    def wait_for_step(self, step: int) -> None:
        self._harness.wait_for_step(step, self._launchers[self.nodes[0].name])

    def kill(self, node: NetworkNode, *, silently: bool = False) -> float:
        """Kill all processes of a node; returns the time."""
        at = time.time()
        node.kill(silently=silently)
        del self._launchers[node.name]
        return at

    def wait_for_verdict(self, at: float) -> RunEvent:
        """The first event by which a launcher reports the fault."""

        def later_events() -> list[RunEvent]:
            return [event for event in artifacts.launcher_verdicts(self._harness.run_folder) if event.ts > at]

        return self._harness.wait_for("a launcher's record", later_events, next(iter(self._launchers.values())))[0]

    def wait_for_restart(self, at: float, ranks: int | None = None) -> RunEvent:
        """The first start from a checkpoint after a time, of this many ranks if given."""

        def later_events() -> list[RunEvent]:
            starts = artifacts.events(self._harness.run_folder, EventKind.RESTART)
            return [event for event in starts if event.ts > at and ranks in (None, event.details.get("world"))]

        return self._harness.wait_for("a restart", later_events, next(iter(self._launchers.values())))[0]

    def wait_for_end(self, result: DrillResult) -> None:
        """Wait for all launchers; require that each exits with 0 at the last step, with every step recorded."""
        for name, launcher in self._launchers.items():
            result.require_equal(f"exit code of the launcher on {name}", launcher.wait(), 0)
        folder = self._harness.run_folder
        result.require_equal("steps recorded", sorted(artifacts.step_history(folder)), list(range(1, self._steps + 1)))
        result.require_equal("newest verified checkpoint", artifacts.newest_good_step(folder), self._steps)

    def measure(self, result: DrillResult, at: float) -> None:
        """Record how long the run stood still after the fault and how many steps it repeated, to the same losses."""
        records = artifacts.beats(self._harness.run_folder)
        first = {beat.step: beat.loss for beat in reversed(records)}
        result.repeated_steps = len(records) - len(first)
        strayed = [beat.step for beat in records if abs((beat.loss or 0.0) - (first[beat.step] or 0.0)) > TOLERANCE]
        result.require(not strayed, f"steps {strayed} gave another loss when they were repeated")
        times = [max((beat.ts for beat in records if beat.ts <= at), default=at)]
        times += sorted(beat.ts for beat in records if beat.ts > at)
        if len(times) < 2:
            raise NotObserved("no step was done after the fault")
        pauses = [(after - before, after) for before, after in pairwise(times)]
        result.continued_s = max(pauses)[1] - at

    def compare(self, result: DrillResult, *, same_world: bool) -> str:
        """Require the weights and losses of an undisturbed run on three ranks: bitwise if this run always had three."""
        folder, calm = self._harness.run_folder, self._harness.undisturbed(NODES, *self._settings)
        if same_world:
            same = artifacts.same_end(folder, calm)
            result.require(same, "the weights or losses differ from those of an undisturbed run")
            return "bitwise equal to an undisturbed run" if same else "not equal to an undisturbed run"
        loss, weight = artifacts.largest_differences(folder, calm)
        result.require(loss <= TOLERANCE, f"a loss differs by {loss:.1e} from that of an undisturbed run")
        result.require(weight <= TOLERANCE, f"a weight differs by {weight:.1e} from that of an undisturbed run")
        return f"losses within {loss:.0e}, weights within {weight:.0e} of an undisturbed run on {NODES} nodes"

    def compare_resumed(self, result: DrillResult, step: int, ranks: int) -> str:
        """Require the weights of a run on that many ranks, without a fault, resumed from the same checkpoint."""
        origin = artifacts.checkpoints(self._harness.run_folder).step_path(step)
        again = self._harness.folder / "again"
        words = ["nsa_train.cli", "launch", "--nproc", str(ranks), *self._harness.arguments(self._settings)]
        process = self._harness.start(*words, f"train.out_dir={again}", "--resume-from", str(origin))
        result.require_equal("exit code of the run for comparison", process.wait(), 0)
        same = artifacts.same_weights(self._harness.run_folder, again)
        result.require(same, f"the weights differ from those of {ranks} undisturbed ranks from step {step}")
        return f"{'bitwise equal' if same else 'not equal'} to {ranks} undisturbed ranks from the same checkpoint"
