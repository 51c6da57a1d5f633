"""Starts the experiment trackers of a run: Weights & Biases through the engine's callback, MLflow through its client.

The engine would call its W&B callback in the training loop, with metrics of a pipeline that is off (see
`bad_step_hook`). Here a background thread calls it with the heartbeat's values, so that nothing in the loop waits.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from types import SimpleNamespace

from olmo_core.exceptions import OLMoEnvironmentError
from olmo_core.train.callbacks import WandBCallback

from nsa.errors import ConfigError
from nsa_train.config.schema import RunConfig
from nsa_train.record.background_logger import BackgroundLogger, MLflowLogger, TrackerIds, TrackingService

_SENT_SECTIONS = {"model", "nsa", "runtime", "kernels", "parallel"}
"""Not data and train: addresses in them may hold passwords."""


class WeightsAndBiases:
    name = "Weights & Biases (track.wandb_project)"

    def __init__(self, callback: WandBCallback, run_folder: Path, ids: TrackerIds) -> None:
        self.errors: tuple[type[Exception], ...] = (OLMoEnvironmentError, OSError)
        self._callback, self._ids = callback, ids
        callback.trainer = SimpleNamespace(work_dir=run_folder)  # all that it reads of a trainer before it logs

    def open(self) -> None:
        import wandb
        from wandb.errors import Error

        self.errors = (Error, OLMoEnvironmentError, OSError)
        if (run_id := self._ids.get("wandb")) is None:
            run_id = token_hex(8)
            self._ids.put("wandb", run_id)
        # By default the client also sends the command line and the console output, which may contain passwords.
        wandb.setup(wandb.Settings(console="off", x_disable_meta=True, run_id=run_id, resume="allow"))
        self._callback.pre_train()

    def send(self, step: int, numbers: dict[str, float]) -> None:
        self._callback.log_metrics(step, numbers)

    def close(self) -> None:
        # Not the callback's `finalize`: it passes an argument that the client no longer has.
        self._callback.run.finish()


def start_tracking(
    config: RunConfig, run_folder: Path, first: bool, warn: Callable[[str], None], *, resuming: bool = False
) -> list[BackgroundLogger]:
    """Only the first rank logs; all ranks raise for a tracker that is not installed.

    `resuming` continues the tracker runs recorded in this folder.
    """
    track, name = config.track, config.track.name or run_folder.resolve().name
    ids = TrackerIds(run_folder, resuming=resuming or not first)
    services: list[TrackingService] = []
    if track.wandb_project is not None:
        _require("wandb", "track.wandb_project")
        callback = WandBCallback(
            name=name,
            project=track.wandb_project,
            entity=track.wandb_entity,
            group=name,
            config=config.model_dump(mode="json", include=_SENT_SECTIONS),
        )
        services.append(WeightsAndBiases(callback, run_folder, ids))
    if track.mlflow_uri is not None:
        _require("mlflow", "track.mlflow_uri")
        services.append(MLflowLogger(track.mlflow_uri, track.mlflow_experiment, name, ids))
    return [BackgroundLogger(service, warn) for service in services] if first else []


def _require(package: str, key: str) -> None:
    if find_spec(package) is None:
        raise ConfigError(
            f"{key} is set and the package {package} is not installed: nothing would be logged. Run: pip install "
            f"'nsa-train[track]', or leave {key} out."
        )
