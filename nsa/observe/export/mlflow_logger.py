"""Logs metrics to MLflow through its client (OLMo-core has no MLflow callback)."""

import time

from nsa.observe.export.background_logger import TrackerIds


class MLflowLogger:
    name = "MLflow (track.mlflow_uri)"

    def __init__(self, uri: str, experiment: str, run_name: str, ids: TrackerIds) -> None:
        self.errors: tuple[type[Exception], ...] = (OSError,)
        self._ids = ids
        self._uri, self._experiment, self._run_name = uri, experiment, run_name

    def open(self) -> None:
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self.errors = (MlflowException, OSError)
        self._client = MlflowClient(self._uri)
        if (known := self._ids.get("mlflow")) is not None and self._continue(known):
            self._run_id = known
            return
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(self._experiment)
        self._run_id = self._client.create_run(experiment, run_name=self._run_name).info.run_id
        self._ids.put("mlflow", self._run_id)

    def _continue(self, run_id: str) -> bool:
        """Reopen this run; False if the server does not have it."""
        from mlflow.exceptions import MlflowException
        from mlflow.protos.databricks_pb2 import RESOURCE_DOES_NOT_EXIST, ErrorCode

        try:
            self._client.update_run(run_id, status="RUNNING")
        except MlflowException as error:
            if error.error_code != ErrorCode.Name(RESOURCE_DOES_NOT_EXIST):
                raise
            return False
        return True

    def send(self, step: int, numbers: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._run_id, [Metric(name, value, now_ms, step) for name, value in numbers.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)
