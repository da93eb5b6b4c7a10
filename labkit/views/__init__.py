"""Tables to figures: a picture is a text made from tables alone, with no cluster behind it."""

from labkit.views.cluster_map import MOST_CELLS, cluster_map, cluster_summary

__all__ = ["MOST_CELLS", "cluster_map", "cluster_summary"]
