"""Adds to Python what knows nothing of arrays: ambient values, pickled names, a small cache, the doors of rooms."""
