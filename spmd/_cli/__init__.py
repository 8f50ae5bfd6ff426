"""Runs the commands behind `python -m spmd`."""
