"""Readers: a specification becomes units in a fixed order, a unit becomes documents. Order and state live elsewhere."""

from nsa.data.source.resolve import open_source
from nsa.data.source.retry_policy import RetryPolicy
from nsa.data.source.row_group import DocumentColumns
from nsa.data.source.unit import CorruptUnit, DocumentSource, SourceUnit

__all__ = ["CorruptUnit", "DocumentColumns", "DocumentSource", "RetryPolicy", "SourceUnit", "open_source"]
