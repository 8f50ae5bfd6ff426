"""What a command does, on a terminal, while it takes long."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec

SECONDS = 2.0  # the silence before progress is shown


@contextlib.contextmanager
def shown_if_slow(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show a text, a bar and the seconds on standard error from the second second on, and remove them at the end.

    Nothing is shown where standard error is not a terminal, or `rich` is not installed.

    Yields:
      A function that is told how much is done, and how much there is. The bar moves to and fro until it is called.
    """
    if not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task(text, total=None)
    timer = threading.Timer(SECONDS, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda done, total: progress.update(task, completed=done, total=total)
    finally:
        timer.cancel()
        timer.join()  # it may be starting the display right now
        progress.stop()
