"""Text for training, as bytes: the sources of Python's standard library, or any file or folder. Plain NumPy."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np

# `encodings` and `pydoc_data` are tables, which are easy to predict and would flatter the score. Not every Python comes
# with the others.
LEFT_OUT = {"encodings", "pydoc_data", "test", "tests", "site-packages", "dist-packages"}


def read_files(data: str) -> list[bytes]:
    """The text files of a folder, or one file; by default the sources of Python's standard library."""
    root = Path(data or sysconfig.get_path("stdlib"))
    paths = [root] if root.is_file() else sorted(root.rglob("*" if data else "*.py"))
    if not data:
        paths = [path for path in paths if not LEFT_OUT & set(path.relative_to(root).parts)]
    return [text for path in paths if path.is_file() and b"\0" not in (text := path.read_bytes())]


def split(data: str, heldout: int, seed: int, least: int) -> tuple[np.ndarray, np.ndarray]:
    """The bytes to train on, and bytes of other files, held out. A single file is cut into pieces first.

    Args:
      data: A file or folder; empty for the standard library.
      heldout: The largest number of bytes to hold out; at most about a tenth of the text is held out.
      seed: The seed that chooses the held-out files.
      least: The smallest useful number of bytes, on either side.
    """
    files = read_files(data)
    if len(files) == 1:
        piece = min(len(files[0]) // 20 + 1, 2**14)
        files = [files[0][i : i + piece] for i in range(0, len(files[0]), piece)]
    files = [files[i] for i in np.random.default_rng(seed).permutation(len(files))]
    ends = np.cumsum([len(text) for text in files] or [0])
    count = int(np.searchsorted(ends, min(heldout, ends[-1] // 10))) + 1
    held, train = (np.frombuffer(b"".join(part), np.uint8) for part in (files[:count], files[count:]))
    held = held[:heldout]
    if min(len(train), len(held)) < least:
        got = f"{len(train):,} bytes to train on and {len(held):,} held out"
        raise SystemExit(f"too little text: {got}, and {least:,} of each are needed")
    return train, held


def entropies(text: np.ndarray) -> tuple[float, float]:
    """The unigram and bigram entropies of a text in bits per byte: what counting alone achieves."""

    def bits(counts: np.ndarray) -> float:
        p = counts[counts > 0] / counts.sum()
        return float(-(p * np.log2(p)).sum())

    pairs = np.bincount(text[:-1].astype(int) * 256 + text[1:], minlength=256**2)
    return bits(np.bincount(text, minlength=256)), bits(pairs) - bits(pairs.reshape(256, 256).sum(axis=1))
