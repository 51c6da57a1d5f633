"""Holes in the safety net: the row of the fault drill that must show each. Minutes each, unlike the other tables."""

from tests.mutations import Mutation


def row(name: str) -> tuple[str, ...]:
    return ("-m", "slow", f"tests/drill/test_drill.py::test_a_row_holds[{name}]")


MUTATIONS = [
    Mutation("drill: damaged tokens are trained on", "nsa/data/shards/reader.py",
             'check_sha256(content.data, expected,', 'print(len(content.data), expected,',
             row("corrupt_shard")),
    Mutation("drill: a step that is not finite is taken", "nsa/train/bad_step_policy.py",
             "        if not reasons:\n            return", "        if True:\n            return", row("nan_gradient")),
    Mutation("drill: SIGTERM is forgotten", "nsa/train/callbacks/stop_requests.py",
             "self.stop_signal = signal.Signals(number).name", "pass", row("sigterm")),
    Mutation("drill: a resumed run begins its data anew", "nsa/train/engine/data_loader.py",
             'self._state = state_dict["cursor"]', "self._state = None", row("sigterm")),
    Mutation("drill: a stale halt file is not looked at", "nsa/train/run.py",
             "if halt_request is not None:", "if False:",
             row("stale_halt")),
    Mutation("drill: a full disk is a crash", "nsa/train/run.py",
             "if error.errno not in NO_ROOM:", "if True:", row("full_disk")),
    Mutation("drill: what can get better is not restarted", "nsa/train/launch/launcher.py",
             "self.code != ExitCode.DONE and self.code not in FINAL_EXITS", "False", row("killed_rank")),
    Mutation("drill: a data server that hangs ends the run", "nsa/train/launch/launcher.py",
             'ExitCode.PREEMPTED: "stopped by a signal',
             'DataError.exit_code: "", ExitCode.PREEMPTED: "stopped by a signal',
             row("stalled_data")),
    Mutation("drill: the watchdog asks nobody for stacks", "nsa/observe/watch/watchdog.py",
             "for line in HangDiagnosis(self.folder, list(self._reader.local())).collect():", "for line in ():",
             row("hung_rank")),
    Mutation("drill: the watchdog does not halt", "nsa/observe/watch/watchdog.py",
             "self._try(lambda: halt_file.request(self.folder, reason, who))", "True", row("gate_collapse")),
    Mutation("drill: slow ranks are not compared", "nsa/observe/watch/health.py",
             "    yield from _stragglers(history, limits)\n", "", row("slow_rank")),
    Mutation("drill: a dead process is halted", "nsa/observe/watch/watchdog.py",
             "self._halt([finding for finding in due if not finding.condition.process_ended])", "self._halt(due)",
             row("killed_trainer")),
    Mutation("drill: one slow fetch is an alarm", "nsa/observe/watch/conditions.py",
             "fetch_s: float = 2.0\n    fetch_records: int = 5", "fetch_s: float = 0.4\n    fetch_records: int = 1",
             row("healthy")),
]  # fmt: skip
