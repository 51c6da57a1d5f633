"""trackers.json: which W&B and MLflow run belongs to a run folder, so that a restart continues it."""

import json
import threading
from pathlib import Path

from nsa.files import write_atomic
from nsa.observe.names import TRACKERS


class TrackerIds:
    """Shared by the threads of all trackers. A run that does not resume begins without ids."""

    def __init__(self, run_folder: Path, *, resuming: bool) -> None:
        self._path = run_folder / TRACKERS
        self._lock = threading.Lock()
        if not resuming:
            self._path.unlink(missing_ok=True)
        self._ids = self._read()

    def get(self, tracker: str) -> str | None:
        return self._ids.get(tracker)

    def put(self, tracker: str, run_id: str) -> None:
        with self._lock:
            self._ids[tracker] = run_id
            write_atomic(self._path, json.dumps(self._ids, indent=2) + "\n")

    def _read(self) -> dict[str, str]:
        """Without ids where the file is missing or damaged: then a tracker gets a second run, and nothing else."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {str(k): v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}
