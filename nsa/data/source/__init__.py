"""Readers: a specification becomes units in a fixed order, a unit becomes documents. Order and state live elsewhere."""

from nsa.data.document import CorruptUnit, DocumentColumns, DocumentSource, SourceUnit
from nsa.data.source.resolve import open_source
from nsa.data.source.retry_policy import RetryPolicy

__all__ = ["CorruptUnit", "DocumentColumns", "DocumentSource", "RetryPolicy", "SourceUnit", "open_source"]
