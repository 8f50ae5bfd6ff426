"""Seeing what a program does: the collectives of its compiled text, with axes, bytes and lines."""

from spmd.inspect._collectives import Collective, CollectiveReport, collectives

__all__ = ["Collective", "CollectiveReport", "collectives"]
