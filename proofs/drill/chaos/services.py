"""Servers that a chaos run depends on: data and object store, in a process of their own, on a node if there are nodes.

As a program (`python -m proofs.drill.chaos.services serve FOLDER HOST`) it writes the addresses to
FOLDER/addresses.json and follows FOLDER/mode.json, which `ServiceControl` writes: how the data server and the store
answer from now on.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from nsa.files import write_atomic
from proofs.drill.data_server import NAME, DataServer, ServerFault
from proofs.drill.object_store import BUCKET, ObjectStore

MODULE = "proofs.drill.chaos.services"
STORE_FOLDER = f"s3://{BUCKET}/run"
DOCUMENTS = 2000
SILENT = "silent"
_ADDRESSES, _MODE = "addresses.json", "mode.json"
_POLL_S = 0.1


@dataclass(frozen=True)
class ServiceControl:
    """The drill's side of the servers."""

    folder: Path

    def started(self) -> bool:
        return (self.folder / _ADDRESSES).exists()

    def addresses(self) -> tuple[str, str]:
        """URLs of the data and of the object store."""
        content = json.loads((self.folder / _ADDRESSES).read_text(encoding="utf-8"))
        return content["data"], content["store"]

    @property
    def data_file(self) -> Path:
        """File with the same data, for the calm run."""
        return self.folder / NAME[1:]

    def set_mode(self, *, data: str = "", store_fails: bool = False) -> None:
        """data: a `ServerFault`, `SILENT`, or nothing."""
        write_atomic(self.folder / _MODE, json.dumps({"data": data, "store_fails": store_fails}))


def serve(folder: Path, host: str) -> None:
    data, store = DataServer(folder, host, DOCUMENTS), ObjectStore(host)
    write_atomic(folder / _ADDRESSES, json.dumps({"data": data.url, "store": store.url}))
    before = ""
    while True:
        time.sleep(_POLL_S)
        mode = (folder / _MODE).read_text(encoding="utf-8") if (folder / _MODE).exists() else ""
        if mode == before:
            continue
        wanted, before = json.loads(mode), mode
        store.failing = wanted["store_fails"]
        data.fault = ServerFault(wanted["data"]) if wanted["data"] not in ("", SILENT) else None
        if wanted["data"] == SILENT:
            data.hang()
        else:
            data.recover()


if __name__ == "__main__":
    serve(Path(sys.argv[2]), sys.argv[3])
