"""Parquet files of a dataset on the hub, by id: `owner/name`, `owner/name:config`, `owner/name:config@revision`.

Only the listing is the hub's own; the files are then read like any other address. The revision is resolved to a commit
once, so that a push to the dataset cannot change the files under a running job.
"""

import fnmatch
import json
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import yaml

from nsa.data.source.http import HttpClient
from nsa.data.source.patience import Deadline, Patience
from nsa.errors import DataError

HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?")
_NEXT_PAGE = re.compile(r'<([^>]+)>;\s*rel="next"')


@dataclass(frozen=True, slots=True)
class HubFile:
    """`name` starts with the commit, so that the fingerprint of another revision is another one."""

    name: str
    url: str


def list_hub(spec: str, client: HttpClient, patience: Patience, *, endpoint: str | None = None) -> list[HubFile]:
    match = HUB_ID.fullmatch(spec)
    if match is None:
        raise DataError(f"{spec!r} is not a dataset id: expected owner/name, owner/name:config or owner/name@revision.")
    if endpoint is None:
        from huggingface_hub.constants import ENDPOINT as endpoint  # follows the user's HF_ENDPOINT
    assert endpoint is not None
    hub = _Hub(endpoint.rstrip("/"), match["repo"], client, patience)
    commit = hub.commit(match["revision"] or "main")
    files = hub.files(commit)
    patterns = _patterns(hub.card(commit) if "README.md" in files else {}, match["config"], spec)
    paths = sorted(p for p in files if p.endswith(".parquet") and any(fnmatch.fnmatchcase(p, q) for q in patterns))
    if not paths:
        raise DataError(f"{spec} at commit {commit} has no parquet file matching {patterns}. Choose another config.")
    return [HubFile(f"{commit}/{path}", hub.address(commit, path)) for path in paths]


class _Hub:
    def __init__(self, endpoint: str, repo: str, client: HttpClient, patience: Patience) -> None:
        self._endpoint, self._repo, self._client, self._patience = endpoint, repo, client, patience

    def address(self, commit: str, path: str) -> str:
        return f"{self._endpoint}/datasets/{self._repo}/resolve/{commit}/{quote(path)}"

    def commit(self, revision: str) -> str:
        answer = self._json(f"{self._endpoint}/api/datasets/{self._repo}/revision/{quote(revision, safe='')}")[0]
        if not isinstance(answer, dict) or not isinstance(answer.get("sha"), str):
            raise DataError(f"the hub at {self._endpoint} did not name a commit for {self._repo}@{revision}.")
        return str(answer["sha"])

    def files(self, commit: str) -> list[str]:
        page: str | None = f"{self._endpoint}/api/datasets/{self._repo}/tree/{commit}?recursive=true"
        paths: list[str] = []
        while page:
            entries, link = self._json(page)
            paths += [entry["path"] for entry in entries if entry.get("type") == "file"]
            following = _NEXT_PAGE.search(link)
            page = following[1] if following else None
        return paths

    def card(self, commit: str) -> dict[str, Any]:
        """The dataset card's header, which says which files belong to which config."""
        body, _ = self._client.listing(self.address(commit, "README.md"), Deadline(self._patience))
        header = re.match(r"\A---\n(.*?)\n---", body.decode("utf-8", "replace").replace("\r\n", "\n"), re.DOTALL)
        card = yaml.safe_load(header[1]) if header else None
        return card if isinstance(card, dict) else {}

    def _json(self, url: str) -> tuple[Any, str]:
        body, link = self._client.listing(url, Deadline(self._patience))
        try:
            return json.loads(body), link
        except ValueError as error:
            raise DataError(f"{url} did not answer with JSON ({error}). Check the hub's address.") from error


def _patterns(card: dict[str, Any], config: str | None, spec: str) -> list[str]:
    configs = {entry.get("config_name", "default"): entry for entry in card.get("configs") or []}
    if not configs and config is None:
        return ["*"]
    default = next((name for name, entry in configs.items() if entry.get("default")), "default")
    wanted = config or default
    if wanted not in configs:
        raise DataError(
            f"{spec} has no config {wanted!r}, only {sorted(configs)}. Write {spec.split(':')[0]}:<config>."
        )
    return _train_patterns(configs[wanted].get("data_files"))


def _train_patterns(data_files: Any) -> list[str]:
    """The card writes a pattern, a list of them, or entries of split and path."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    patterns: list[str] = []
    for entry in entries:
        if isinstance(entry, dict) and entry.get("split", "train") != "train":
            continue
        paths = entry.get("path") if isinstance(entry, dict) else entry
        patterns += [paths] if isinstance(paths, str) else [p for p in paths or [] if isinstance(p, str)]
    return patterns
