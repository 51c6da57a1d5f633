"""Lists the parquet files of a Hugging Face hub dataset: `owner/name[:config][@revision]`.

Only the listing uses the hub's API; the files are then read like any other URL. The revision is resolved to a commit
once, so that a push to the dataset cannot change the files of a running job. The size of responses is limited
(`ListingLimits`).
"""

import fnmatch
import json
import re
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlsplit

import yaml

from nsa.errors import DataError
from nsa_train.data.source.file import HttpFile
from nsa_train.data.source.http import HttpClient, ReadDeadline, RetryPolicy

# The smallest published sample of FineWeb-Edu: 14 files to list instead of thousands.
FINEWEB_EDU = "HuggingFaceFW/fineweb-edu:sample-10BT"
HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?(@(?P<revision>[\w./-]+))?")
_NEXT_PAGE = re.compile(r'<([^>]+)>;\s*rel="next"')


@dataclass(frozen=True, slots=True)
class ListingLimits:
    """Limits of a listing, far above what the largest datasets need: protection from a faulty or hostile server."""

    answer_bytes: int = 16 * 2**20
    card_bytes: int = 4 * 2**20
    card_header_bytes: int = 512 * 2**10  # parsing a longer one takes seconds
    total_bytes: int = 512 * 2**20
    pages: int = 5_000
    entries: int = 1_000_000
    seconds: float = 600.0


def list_hub(
    spec: str,
    client: HttpClient,
    retry_policy: RetryPolicy,
    *,
    endpoint: str | None = None,
    limits: ListingLimits | None = None,
) -> list[HttpFile]:
    """The parquet files of a dataset. Names start with the commit, so that revisions have different fingerprints."""
    match = HUB_ID.fullmatch(spec)
    if match is None:
        raise DataError(f"{spec!r} is not a dataset id: expected owner/name, owner/name:config or owner/name@revision.")
    if endpoint is None:
        from huggingface_hub.constants import ENDPOINT as endpoint  # follows the user's HF_ENDPOINT
    assert endpoint is not None
    hub = _HubClient(endpoint.rstrip("/"), match["repo"], client, retry_policy, limits or ListingLimits())
    commit = hub.commit(match["revision"] or "main")
    files = hub.files(commit)
    patterns = _patterns(hub.card(commit) if "README.md" in files else {}, match["config"], spec)
    paths = sorted(p for p in files if p.endswith(".parquet") and any(fnmatch.fnmatchcase(p, q) for q in patterns))
    if not paths:
        raise DataError(f"{spec} at commit {commit} has no parquet file matching {patterns}. Choose another config.")
    return [HttpFile(f"{commit}/{path}", hub.url(commit, path), client, immutable=True) for path in paths]


class _HubClient:
    def __init__(
        self, endpoint: str, repo: str, client: HttpClient, retry_policy: RetryPolicy, limits: ListingLimits
    ) -> None:
        self._endpoint, self._repo, self._client, self._retry_policy = endpoint, repo, client, retry_policy
        self._limits = limits
        self._started = time.monotonic()
        self._bytes = 0

    def url(self, commit: str, path: str) -> str:
        return f"{self._endpoint}/datasets/{self._repo}/resolve/{commit}/{quote(path)}"

    def commit(self, revision: str) -> str:
        answer = self._json(f"{self._endpoint}/api/datasets/{self._repo}/revision/{quote(revision, safe='')}")[0]
        if not isinstance(answer, dict) or not isinstance(answer.get("sha"), str):
            raise DataError(
                f"the hub at {self._endpoint} returned no commit for {self._repo}@{revision}. Check the revision."
            )
        return str(answer["sha"])

    def files(self, commit: str) -> list[str]:
        page: str | None = f"{self._endpoint}/api/datasets/{self._repo}/tree/{commit}?recursive=true"
        paths: list[str] = []
        pages = entries = 0
        while page:
            pages += 1
            self._check_limit("pages", pages, self._limits.pages)
            answer, link = self._json(page)
            if not isinstance(answer, list) or not all(isinstance(entry, dict) for entry in answer):
                raise DataError(f"{page} did not return a list of files. Check the hub's URL.")
            entries += len(answer)
            self._check_limit("entries", entries, self._limits.entries)
            paths += [str(entry.get("path", "")) for entry in answer if entry.get("type") == "file"]
            following = _NEXT_PAGE.search(link)
            page = self._same_server(following[1]) if following else None
        return paths

    def card(self, commit: str) -> dict[str, Any]:
        """The YAML header of the dataset card, which lists the files of each config."""
        url = self.url(commit, "README.md")
        body, _ = self._get(url, self._limits.card_bytes)
        header = re.match(r"\A---\n(.*?)\n---", body.decode("utf-8", "replace").replace("\r\n", "\n"), re.DOTALL)
        if header:
            self._check_limit("bytes in the header of its card", len(header[1]), self._limits.card_header_bytes)
        try:
            card = yaml.safe_load(header[1]) if header else None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise DataError(
                f"{url} has a header that is not YAML ({error}). Report it to the dataset's owner."
            ) from error
        return card if isinstance(card, dict) else {}

    def _json(self, url: str) -> tuple[Any, str]:
        body, link = self._get(url, self._limits.answer_bytes)
        try:
            return json.loads(body), link
        except (ValueError, RecursionError) as error:
            raise DataError(f"{url} did not return JSON ({error}). Check the hub's URL.") from error

    def _get(self, url: str, max_bytes: int) -> tuple[bytes, str]:
        self._check_limit("seconds", time.monotonic() - self._started, self._limits.seconds)
        body, link = self._client.listing(url, ReadDeadline(self._retry_policy), max_bytes)
        self._bytes += len(body)
        self._check_limit("bytes", self._bytes, self._limits.total_bytes)
        return body, link

    def _check_limit(self, what: str, value: float, limit: float) -> None:
        if value > limit:
            raise DataError(
                f"the listing of {self._repo} at {self._endpoint} has {value:.0f} {what}, the limit is {limit:.0f}: no "
                "dataset is that large. Check the hub's URL, or download the files and set the path to their folder."
            )

    def _same_server(self, url: str) -> str:
        """Refuse a next page on another server: it would receive our request headers."""
        here, there = urlsplit(self._endpoint), urlsplit(url)
        if (here.scheme, here.netloc) != (there.scheme, there.netloc):
            raise DataError(
                f"the listing of {self._repo} continues on another server ({there.scheme}://{there.netloc} instead of "
                f"{here.scheme}://{here.netloc}), which is not followed. Check the hub's URL."
            )
        return url


def _patterns(card: dict[str, Any], config: str | None, spec: str) -> list[str]:
    listed = card.get("configs")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    configs = {str(entry.get("config_name", "default")): entry for entry in entries}
    if not configs and config is None:
        return ["*"]
    default = next((name for name, entry in configs.items() if entry.get("default")), "default")
    selected = config or default
    if selected not in configs:
        raise DataError(
            f"{spec} has no config {selected!r}, only {sorted(configs)}. Write {spec.split(':')[0]}:<config>."
        )
    return _train_patterns(configs[selected].get("data_files"))


def _train_patterns(data_files: Any) -> list[str]:
    """`data_files` of a card: a pattern, a list of patterns, or entries with split and path."""
    entries = data_files if isinstance(data_files, list) else [data_files]
    patterns: list[str] = []
    for entry in entries:
        if isinstance(entry, dict) and entry.get("split", "train") != "train":
            continue
        paths = entry.get("path") if isinstance(entry, dict) else entry
        if isinstance(paths, str):
            patterns.append(paths)
        elif isinstance(paths, list):
            patterns += [path for path in paths if isinstance(path, str)]
    return patterns
