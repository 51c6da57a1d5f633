"""Document sources: parquet and JSONL files, local, over HTTP or on the Hugging Face hub. Shuffling lives elsewhere."""

from nsa_train.data.document import CorruptUnit, DocumentColumns, DocumentSource, SourceUnit
from nsa_train.data.source.resolve import open_source
from nsa_train.data.source.retry_policy import RetryPolicy

__all__ = ["CorruptUnit", "DocumentColumns", "DocumentSource", "RetryPolicy", "SourceUnit", "open_source"]
