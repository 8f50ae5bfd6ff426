"""One process of `python -m spmd launch`: it runs the program, and ends with its exit code at once.

A process that leaves by `sys.exit` waits in JAX's shutdown for the others, which wait for it. Only who runs the program
sees that exit. It is run as a file and imports neither JAX nor `spmd`, so that the program still sets what they read.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
import threading


def main(arguments: list[str]) -> None:
    """Run `-m module ...` or `file.py ...` as the interpreter would."""
    _end_with_the_launcher(int(arguments[0]))
    for stream in (sys.stdout, sys.stderr):  # whole lines: other threads of the process write to the same pipes
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    target, rest = arguments[1], arguments[2:]
    code = 0
    try:
        if target == "-m":
            sys.argv, sys.path[0] = rest, os.getcwd()
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = [target, *rest], os.path.dirname(os.path.abspath(target))
            runpy.run_path(target, run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
            trace = trace.tb_next
        # in a program that joined the others it ends here
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    if code:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _end_with_the_launcher(pipe: int) -> None:
    """End when the other end of the pipe is closed: the launcher was killed."""

    def watch() -> None:
        os.read(pipe, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    main(sys.argv[1:])
