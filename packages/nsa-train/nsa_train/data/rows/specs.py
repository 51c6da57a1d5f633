"""Dataset specs: settings of prepared, direct and synthetic data, each of which opens a row stream.

Specs are small and picklable, because the prefetch process opens its own stream. The kind is selected explicitly; no
kind is a fallback for another.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from nsa.errors import ConfigError
from nsa.options import SyntheticTask
from nsa_train.data.document_stream import AtEnd, DocumentStream, Split
from nsa_train.data.rows.batch import rows_of_rank
from nsa_train.data.rows.mixture import MixedRows, MixtureOrder
from nsa_train.data.rows.packing import Packing, make_packer
from nsa_train.data.rows.prepared import PreparedRows
from nsa_train.data.rows.row_stream import DirectRowStream, IndexedRowStream, RowStream
from nsa_train.data.rows.synthetic import SyntheticRows
from nsa_train.data.shards.manifest import TRAIN
from nsa_train.data.shards.reader import ShardCache, ShardReader
from nsa_train.data.source.http import RetryPolicy
from nsa_train.data.source.resolve import open_source
from nsa_train.data.tokenizer import check_same, load_tokenizer, token_dtype
from nsa_train.data.unit_exchange import ExchangeSettings
from nsa_train.storage import StorageFolder

GIB = 2**30


@dataclass(frozen=True, slots=True)
class PreparedData:
    """A set written by `nsa data prepare`. `tokenizer`, if given, must be the one it was prepared with."""

    url: str
    seq_len: int
    split: str = TRAIN
    seed: int = 0
    shuffle: bool = True
    max_epochs: int | None = None
    tokenizer: str | None = None
    cache_path: str | None = None
    cache_limit_bytes: int = 100 * GIB
    with_provenance: bool = False
    mask_document_ends: bool = True

    def make_rows(self) -> PreparedRows:
        folder = StorageFolder(self.url)
        cache = ShardCache(Path(self.cache_path), self.cache_limit_bytes) if self.cache_path else None
        reader = ShardReader(folder, self.split, cache=cache)
        if self.tokenizer is not None:
            manifest = reader.manifest
            check_same(manifest.vocab_size, manifest.tokenizer_fingerprint, load_tokenizer(self.tokenizer))
        return PreparedRows(
            reader,
            self.seq_len,
            shuffle_seed=self.seed if self.shuffle else None,
            max_epochs=self.max_epochs,
            with_provenance=self.with_provenance,
            mask_document_ends=self.mask_document_ends,
        )

    def open(self) -> RowStream:
        return IndexedRowStream(self.make_rows())

    def __str__(self) -> str:
        return f"prepared set {self.url} ({self.split})"


@dataclass(frozen=True, slots=True)
class MixedData:
    """Prepared sets of one tokenizer, of which rows are taken in the proportions of the weights."""

    sets: tuple[PreparedData, ...]
    weights: tuple[int, ...]
    """See `nsa_train.data.rows.mixture.whole_weights`."""
    seq_len: int

    def open(self) -> RowStream:
        rows = {each.url: replace(each, seq_len=self.seq_len).make_rows() for each in self.sets}
        return IndexedRowStream(MixedRows(rows, MixtureOrder(self.weights)))

    def __str__(self) -> str:
        total = sum(self.weights)
        shares = (f"{each.url} {weight / total:.1%}" for each, weight in zip(self.sets, self.weights, strict=True))
        return f"prepared sets {', '.join(shares)} ({self.sets[0].split})"


@dataclass(frozen=True, slots=True)
class DirectData:
    """Documents read, tokenized and packed during training. `loader_timeout_s` limits every read of the source;
    `cache_path` keeps a hub dataset's listing between starts, `checksum_path` the checksum of every unit read;
    `exchange` divides the reading among ranks."""

    source: str
    tokenizer: str
    seq_len: int
    seed: int = 0
    split: Split = "train"
    held_out_fraction: float = 0.0
    at_end: AtEnd = "repeat"
    packing: Packing = "concat"
    buffer_rows: int = 64
    max_bad_units: int = 8
    loader_timeout_s: float = 120.0
    cache_path: str | None = None
    checksum_path: str | None = None
    exchange: ExchangeSettings | None = None
    mask_document_ends: bool = True

    def open(self) -> RowStream:
        tokenizer = load_tokenizer(self.tokenizer)
        packer = make_packer(
            self.packing,
            seq_len=self.seq_len,
            eos_id=tokenizer.eos_id,
            dtype=token_dtype(tokenizer.vocab_size),
            buffer_rows=self.buffer_rows,
        )
        source = open_source(
            self.source,
            retry_policy=RetryPolicy.below(self.loader_timeout_s),
            cache_dir=Path(self.cache_path) if self.cache_path else None,
            checksum_dir=Path(self.checksum_path) if self.checksum_path else None,
        )
        documents = DocumentStream(
            source,
            tokenizer,
            seed=self.seed,
            split=self.split,
            held_out_fraction=self.held_out_fraction,
            at_end=self.at_end,
            max_bad_units=self.max_bad_units,
            exchange=self.exchange,
        )
        name = self.packing if self.packing == "concat" else f"{self.packing}:{self.buffer_rows}"
        return DirectRowStream(
            documents, packer, seq_len=self.seq_len, packing=name, mask_document_ends=self.mask_document_ends
        )

    def __str__(self) -> str:
        return f"documents of {self.source} ({self.split})"


@dataclass(frozen=True, slots=True)
class SyntheticData:
    task: SyntheticTask
    vocab_size: int
    seq_len: int
    seed: int = 0

    def make_rows(self) -> SyntheticRows:
        return SyntheticRows(self.task, vocab_size=self.vocab_size, seq_len=self.seq_len, seed=self.seed)

    def open(self) -> RowStream:
        return IndexedRowStream(self.make_rows())

    def __str__(self) -> str:
        return f"synthetic rows ({self.task})"


RowData = PreparedData | MixedData | DirectData | SyntheticData


def check_batch(data: RowData, global_rows: int, world: int) -> None:
    """Raise for an impossible batch before a process is started for it."""
    if data.seq_len < 1:
        raise ConfigError(f"seq_len is {data.seq_len}: a row needs at least one token.")
    rows_of_rank(global_rows, 0, world)
