"""What a command does, on a terminal, while it takes long."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

SECONDS = 2.0  # from then on a reader wonders


@contextlib.contextmanager
def shown_if_slow(text: str) -> Iterator[None]:
    """Show a text and the seconds on standard error from the second second on, and remove them at the end.

    Nothing is shown where standard error is not a terminal, or `rich` is not installed.
    """
    try:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ImportError:
        yield
        return
    if not sys.stderr.isatty():
        yield
        return
    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    progress.add_task(text, total=None)
    timer = threading.Timer(SECONDS, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may just be starting
        progress.stop()
