"""Builds the training and held-out datasets of a run from its settings; location of the data."""

import glob
from contextlib import suppress
from pathlib import Path
from typing import Any

from nsa.errors import ConfigError, DataError, NSAError
from nsa_train import names
from nsa_train.config.schema import RunConfig
from nsa_train.data.rows.mixture import whole_weights
from nsa_train.data.rows.specs import GIB, DirectData, MixedData, PreparedData, RowData, SyntheticData
from nsa_train.data.shards.manifest import TRAIN, VALIDATION, ShardManifest, read_from_set, read_manifest
from nsa_train.data.source.hub import FINEWEB_EDU
from nsa_train.data.tokenizer import Tokenizer, check_same, load_tokenizer, tokenizer_record
from nsa_train.planning.hardware import HardwareTarget
from nsa_train.planning.preflight_facts import DryRunAttempt, FolderFacts
from nsa_train.storage import StorageFolder

_PACKING = {"stream": "concat", "best_fit": "best_fit"}
_AT_END = {"epoch": "repeat", "error": "error"}
_HELD_OUT_SEED = 1 << 32  # synthetic rows of a seed that no run can be given


def vocabulary(config: RunConfig) -> int:
    """Vocabulary size of the data."""
    if config.data.dataset == "prepared":
        return _manifest(config).vocab_size
    return load_tokenizer(config.data.tokenizer).vocab_size


def saved_tokenizer(config: RunConfig, vocab_size: int) -> Tokenizer | None:
    """The tokenizer that a run keeps with its checkpoints; None if the one of its data is not known.

    That is so for a prepared set of an earlier version whose tokenizer is not data.tokenizer, and for synthetic rows
    whose ids are not those of data.tokenizer.
    """
    if config.data.dataset == "prepared":
        return _tokenizer_of_set(StorageFolder(_path(config)), config.data.tokenizer)
    try:
        tokenizer = load_tokenizer(config.data.tokenizer)
    except ConfigError:
        if config.data.dataset == "synthetic" or config.data.synthetic_on_fail:
            return None
        raise
    return tokenizer if tokenizer.vocab_size <= vocab_size else None


def _tokenizer_of_set(folder: StorageFolder, spec: str) -> Tokenizer | None:
    """The tokenizer beside the manifest, else the one in the settings, if it is the one the set was prepared with."""
    manifest = read_manifest(folder)
    with suppress(ConfigError, DataError):  # a tokenizer.json of another program
        if (saved := read_from_set(folder, manifest)) is not None:
            return saved
    try:
        tokenizer = load_tokenizer(spec)
        check_same(manifest.vocab_size, manifest.tokenizer_fingerprint, tokenizer)
    except (ConfigError, DataError):
        return None
    return tokenizer


def data_tokenizer_record(config: RunConfig) -> dict[str, Any] | None:
    """Vocabulary size, fingerprint and end-of-document id of the data's tokenizer; None for synthetic data."""
    if config.data.dataset == "synthetic" or config.data.synthetic_on_fail:
        return None
    if config.data.dataset == "prepared":
        return _manifest(config).tokenizer_record
    return tokenizer_record(load_tokenizer(config.data.tokenizer))


def require_set_tokenizer(config: RunConfig) -> None:
    """Raise if data.tokenizer was set and is another one than that of the prepared set, which alone is used."""
    if config.data.dataset != "prepared" or config.origin("data.tokenizer") == "default":
        return
    try:
        tokenizer = load_tokenizer(config.data.tokenizer)
    except ConfigError:  # a set brings its own tokenizer, so the file may be missing
        return
    manifest = _manifest(config)
    if tokenizer.fingerprint != manifest.tokenizer_fingerprint:
        raise ConfigError(
            f"data.tokenizer={config.data.tokenizer} has {tokenizer.vocab_size} ids (fingerprint "
            f"{tokenizer.fingerprint[:16]}…), and the prepared set {_path(config)} was made with a tokenizer of "
            f"{manifest.vocab_size} ids (fingerprint {manifest.tokenizer_fingerprint[:16]}…): a set is used with its "
            f"own. Remove data.tokenizer or set it to {_path(config)}/{names.TOKENIZER}, or prepare the set again with "
            "this tokenizer."
        )


def require_tokenizer(config: RunConfig) -> None:
    """Raise if the tokenizer that documents need is missing, is not that of the prepared set, or has more ids than the
    embedding has rows."""
    require_set_tokenizer(config)
    if config.data.dataset in ("synthetic", "prepared") or config.data.synthetic_on_fail:
        return
    ids, rows = load_tokenizer(config.data.tokenizer).vocab_size, config.model.vocab_size
    if rows is not None and ids > rows:
        raise ConfigError(
            f"model.vocab_size ({rows}) is less than the {ids} ids of data.tokenizer ({config.data.tokenizer}): ids "
            f"beyond it have no embedding. Set model.vocab_size={ids}, or null to take the tokenizer's."
        )


def training_rows(config: RunConfig, vocab_size: int, run_folder: Path | None = None) -> RowData:
    """`run_folder` stores the checksums of the units that are read, unless data.cache_dir does."""
    return _rows(config, vocab_size, run_folder, held_out=False)


def held_out_rows(config: RunConfig, vocab_size: int, run_folder: Path | None = None) -> RowData:
    """One pass over rows that training never sees."""
    return _rows(config, vocab_size, run_folder, held_out=True)


def remote_address(config: RunConfig) -> str | None:
    """Address of the data if it is not on this machine, else None."""
    if config.data.dataset == "synthetic":
        return None
    if config.data.mixture is not None:
        return next((path for path in config.data.mixture if "://" in path), None)
    path = config.data.path
    if path is None:
        return config.data.dataset
    return path if "://" in path or (config.data.dataset == "fineweb_edu" and not Path(path).exists()) else None


def find_data(config: RunConfig) -> None:
    """Raise if local data or the tokenizer is missing. Reads no document."""
    vocabulary(config)
    if config.data.dataset in ("synthetic", "prepared") or remote_address(config) is not None:
        return
    path = _path(config)
    if not Path(path).exists() and not glob.glob(path, recursive=True):
        raise DataError(
            f"data.path is {path} and there is no such file or folder. Set data.path to the location of your data."
        )


def look_for_data(config: RunConfig, target: HardwareTarget, folder: FolderFacts, resuming: bool) -> DryRunAttempt:
    """Whether the data exists. A run that resumes from a checkpoint checks that itself, and may wait for it."""
    if config.data.synthetic_on_fail or (resuming and folder.checkpoints):
        return DryRunAttempt(not_tried="the run itself checks it")
    if place := remote_address(config):
        return DryRunAttempt(not_tried=f"{place} is on another machine")
    if not target.here:
        return DryRunAttempt(not_tried=f"{target} is not here, so its disk could not be checked")
    try:
        find_data(config)
    except NSAError as error:
        return DryRunAttempt(problem=str(error))
    return DryRunAttempt(not_tried="no batch was fetched: no dry run was requested")


def _rows(config: RunConfig, vocab_size: int, run_folder: Path | None, *, held_out: bool) -> RowData:
    data, seq_len, seed = config.data, config.train.seq_len, config.train.seed
    if data.dataset == "synthetic":
        return SyntheticData(data.synthetic_task, vocab_size, seq_len, seed + _HELD_OUT_SEED if held_out else seed)
    if data.dataset == "prepared":
        sets = [
            PreparedData(
                path,
                seq_len,
                split=VALIDATION if held_out else TRAIN,
                seed=seed,
                shuffle=not held_out,
                max_epochs=1 if held_out or data.on_end == "error" else None,
                cache_path=data.cache_dir,
                cache_limit_bytes=int(data.cache_gib * GIB),
                mask_document_ends=data.mask_document_ends,
            )
            for path in data.mixture or [_path(config)]
        ]
        return sets[0] if data.mixture is None else MixedData(tuple(sets), whole_weights(data.mixture), seq_len)
    return DirectData(
        _path(config),
        data.tokenizer,
        seq_len,
        seed=seed,
        split="validation" if held_out else "train",
        held_out_fraction=data.held_out,
        at_end="stop" if held_out else _AT_END[data.on_end],  # type: ignore[arg-type]
        packing=_PACKING[data.packing],  # type: ignore[arg-type]
        max_bad_units=data.max_bad_units,
        loader_timeout_s=data.loader_timeout_s,
        cache_path=data.cache_dir,
        checksum_path=data.cache_dir or (str(run_folder / names.DATA_CHECKSUMS) if run_folder else None),
        mask_document_ends=data.mask_document_ends,
    )


def _manifest(config: RunConfig) -> ShardManifest:
    """The manifest of the prepared set, or of the first of a mixture, whose sets must have one tokenizer."""
    manifests = {path: read_manifest(StorageFolder(path)) for path in config.data.mixture or [_path(config)]}
    (first, manifest), *others = manifests.items()
    for path, other in others:
        if other.tokenizer_record != manifest.tokenizer_record:
            raise ConfigError(
                f"data.mixture has sets of different tokenizers: {first} with {manifest.vocab_size} ids (fingerprint "
                f"{manifest.tokenizer_fingerprint[:16]}…) and {path} with {other.vocab_size} ids (fingerprint "
                f"{other.tokenizer_fingerprint[:16]}…): the same ids mean other text. Prepare {path} again: nsa data "
                f"prepare SRC OUT --tokenizer {first}/{names.TOKENIZER}"
            )
    return manifest


def _path(config: RunConfig) -> str:
    """Place of the data; of a mixture that of its first set."""
    if config.data.mixture is not None:
        return next(iter(config.data.mixture))
    if config.data.path is not None:
        return config.data.path
    if config.data.dataset == "fineweb_edu":
        return FINEWEB_EDU
    raise ConfigError(f"data.dataset={config.data.dataset} needs data.path: it has no default.")
