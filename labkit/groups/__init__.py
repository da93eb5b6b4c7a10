"""Consumer groups whose members are processes, and cells that run as programs of their own."""

from labkit.groups.group import Group, Prediction
from labkit.groups.spawn import Program

__all__ = ["Group", "Prediction", "Program"]
