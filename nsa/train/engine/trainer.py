"""The engine's trainer without its metrics pipeline: the heartbeat is the record of a run."""

from dataclasses import dataclass

from olmo_core.train import Trainer


@dataclass
class QuietTrainer(Trainer):
    """The engine reduces metrics over ranks in a thread, and records how long a background save took at whatever step
    each rank has reached. Ranks then reduce different sets of metrics and wait for each other for ever. Nothing here
    reads those metrics, so they are dropped; callbacks still see them until the step ends.
    """

    def fit(self) -> None:
        try:
            super().fit()
        except BaseException as error:
            if self._error is not error:  # after the last step the engine tells its callbacks nothing
                for callback in self._iter_callbacks():
                    callback.on_error(error)
            raise

    def _log_metrics(self) -> None:
        self._metrics.clear()
