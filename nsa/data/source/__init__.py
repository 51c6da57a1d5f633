"""Readers: a specification becomes units in a fixed order, a unit becomes documents. Order and state live elsewhere."""

from nsa.data.source.opening import open_source
from nsa.data.source.patience import Patience
from nsa.data.source.row_group import Columns
from nsa.data.source.unit import CorruptUnit, Source, Unit

__all__ = ["Columns", "CorruptUnit", "Patience", "Source", "Unit", "open_source"]
