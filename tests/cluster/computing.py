"""A sample that takes Python to compute. It is a module of its own, which processes that read import without JAX."""

import os
import time

import numpy as np


def sample(index: int) -> np.ndarray:
    """Its number, and the process that has computed it."""
    time.sleep(0.01)  # so that one process is not quick enough to read all
    return np.array([index, os.getpid()], np.int32)
