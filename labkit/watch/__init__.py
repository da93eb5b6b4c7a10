"""Spark: the session, and the stream over the offsets topic with its decode, fold and trace."""

from labkit.watch.log import tables
from labkit.watch.stream import Watch
from labkit.watch.trace import Trace, open

__all__ = ["Trace", "Watch", "open", "tables"]
