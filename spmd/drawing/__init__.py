"""Pictures: grids of cells, drawn as text and as SVG. What is drawn is decided above: by `inspect` and `parallel`."""

from spmd.drawing._picture import Picture

__all__ = ["Picture"]
