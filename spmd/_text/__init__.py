"""Writes text for people: tables, quantities, the names of notebook cells."""
