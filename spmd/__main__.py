"""`python -m spmd`: plan, draw, explain, check, port, search, launch, and print the rules of the checker."""

from __future__ import annotations

import argparse
import inspect
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spmd import __version__

_VERSION = f"spmd {__version__}"
_EXAMPLES = """examples:
  python -m spmd plan "a/x b -> a b/x" --mesh x=4 --size a=4096,b=4096 --dtype bf16
  python -m spmd plan "a/x/y b -> a/y b/x" --mesh x=2 --mesh y=4 --size a=64 --size b=64 --picture
  python -m spmd show "b/dp (h k)/tp" --mesh dp=2,tp=4 --size b=8,h=4,k=16 --svg layout.svg
  python -m spmd explain mlp.py:mlp --mesh dp=2,tp=4 --size b=4,s=16,d=32,f=64 --hardware h100
  python -m spmd check mlp.py:mlp --mesh dp=2,tp=4 --size b=4,s=16,d=32,f=64 --source
  python -m spmd check loss.py:loss --layouts "b/dp d, d f/tp" --mesh dp=2,tp=4 --size b=4,d=32,f=64 --source
  python -m spmd port layers.py:build --mesh dp=2,tp=4
  python -m spmd search step.py:build --devices 512 --axes dp,tp --hardware h100 --top 3
  python -m spmd rules
  python -m spmd launch -n 2 --devices 4 train.py --steps 100
"""


def _called() -> str:
    """Return how the command was called: by its script, or as a module."""
    return "spmd" if Path(sys.argv[0]).stem == "spmd" else "python -m spmd"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_called(),
        description="Plan the cheapest change of layout, draw which device holds what, explain or check a program,\n"
        "rewrite one as kernels, search the mesh that suits it, print the rules of the checker, or start a program as\n"
        "several processes.",
        epilog=_EXAMPLES.replace("python -m spmd", _called()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_VERSION)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    from spmd.comm._planned import PREFER

    plan = _command(
        commands,
        "plan",
        "the cheapest steps from one layout to another",
        "The cheapest steps from one layout to another: bytes per device, lower bound, ratio.",
    )
    plan.add_argument("pattern", help='"layout -> layout", such as "a/x b -> a b/x"')
    _add_mesh_and_sizes(plan)
    plan.add_argument("--dtype", default="float32", help="of the elements: float32 (default), bf16, i8, ...")
    plan.add_argument("--prefer", default=PREFER[0], metavar="WHAT", help=f"{', '.join(PREFER)} (default {PREFER[0]})")
    plan.add_argument("--hardware", metavar="NAME", help="a profile, such as h100 or tpu-v5p: adds times")
    plan.add_argument("--picture", action="store_true", help="draw each step below the table")
    _add_output(plan)

    show = _command(
        commands,
        "show",
        "which device holds what",
        "Which device holds which block of an array. Sizes that are not given leave blocks numbered.",
    )
    show.add_argument("layout", help='a layout, such as "b/dp (h k)/tp"')
    _add_mesh_and_sizes(show)
    _add_output(show)

    _add_programs(commands)
    _add_port(commands)
    _add_search(commands)
    rules = _command(
        commands,
        "rules",
        "what the checker knows of each primitive",
        "For each primitive of JAX: how dimensions pass through it, and what becomes of a partial\nsum.",
    )
    rules.add_argument("--json", action="store_true", help="print JSON")
    _add_launch(commands)
    return parser


def _command(commands: Any, name: str, summary: str, description: str) -> argparse.ArgumentParser:
    """A command with its examples."""
    first, *lines = _EXAMPLES.splitlines()
    examples = "\n".join([first, *(line for line in lines if f" spmd {name}" in line)])
    examples = examples.replace("python -m spmd", _called())
    described = argparse.RawDescriptionHelpFormatter
    return commands.add_parser(name, help=summary, description=description, epilog=examples, formatter_class=described)


def _add_programs(commands: Any) -> None:
    """`explain` and `check`, which take a program by its name in a file."""
    explain = _command(
        commands,
        "explain",
        "what a program sends",
        "What a program sends, from which line, over which axes. It is traced, not run. PROGRAM is\n"
        "FILE:KERNEL, with the sizes of the names in its layouts, or FILE:build, where build(mesh) returns a\n"
        "function and its arguments, or FILE:FUNCTION with --layouts for its arguments. A program without kernels is\n"
        "divided by the compiler: then its plan is shown.",
    )
    explain.add_argument("--hardware", metavar="NAME", help="a profile, such as h100 or tpu-v5p: adds times")
    explain.add_argument("--compile", action="store_true", help="compile it too, for virtual CPU devices")
    explain.add_argument(
        "--target", metavar="WHAT", help="compile it for devices that are not here: h100_sxm.txtpb, v5p:2x2x2"
    )
    explain.add_argument("--json", action="store_true", help="print JSON")
    check = _command(
        commands,
        "check",
        "where a program does not mean what its layouts say",
        "The findings of the checker for a whole program. It is traced, not run. PROGRAM as in explain.\n"
        "Of a program without kernels, the compiler's plan. Exits with 1 if there are findings, but for questions:\n"
        "what may be meant per shard; with --strict, with 3 if numbers could not be compared.",
    )
    check.add_argument("--source", action="store_true", help="print the program with the layout of each line")
    check.add_argument("--json", action="store_true", help="print the findings as JSON")
    check.add_argument("--reference", metavar="FUNCTION", help="the same in plain JAX on whole arrays: train.py:plain")
    check.add_argument("--strict", action="store_true", help="fail unless the program is proved or tested")
    for parser in (explain, check):
        parser.add_argument("program", metavar="PROGRAM", help="a file and a name in it: train.py:step")
        _add_mesh_and_sizes(parser, needed=False)
        parser.add_argument(
            "--layouts", metavar="LAYOUTS", help='of the arguments of a plain function: "b/dp d, d f/tp"'
        )
        parser.add_argument(
            "--dtype", action="append", default=[], help="of arguments: float32 (default), ids=i32, ..."
        )


def _add_port(commands: Any) -> None:
    port = _command(
        commands,
        "port",
        "a program with raw shard_maps as kernels",
        "Your own text, with each shard_map as a kernel and each collective as a verb; what no string says stays.\n"
        "Both programs run on virtual CPU devices, and results, gradients and bytes are compared. PROGRAM is\n"
        "FILE:build, where build(mesh) returns a function and its arguments, or FILE:FUNCTION with --layouts for its\n"
        "arguments. Exits with 1 if the kernels do not give the same.",
    )
    port.add_argument("program", metavar="PROGRAM", help="a file and a name in it: layers.py:build")
    _add_mesh_and_sizes(port)
    port.add_argument("--layouts", metavar="LAYOUTS", help='of the arguments of a plain function: "b/dp d, d f/tp"')
    port.add_argument("--names", metavar="NAMES", help='of the dimensions of the arguments: "b s d, d f"')
    port.add_argument("--dtype", action="append", default=[], help="of arguments: float32 (default), ids=i32, ...")


def _add_search(commands: Any) -> None:
    from spmd import search as search_meshes

    search = _command(
        commands,
        "search",
        "which mesh suits a program best",
        "Every factorisation of the device count: excluded by a bound, or traced and priced. It is not\n"
        "run. PROGRAM is FILE:build, where build(mesh) returns a function, its arguments, and if it likes a\n"
        "spmd.searcher.Bound.",
    )
    default = {name: one.default for name, one in inspect.signature(search_meshes).parameters.items()}
    axes = ",".join(default["axes"])
    search.add_argument("program", metavar="PROGRAM", help="a file and a function in it: train.py:build")
    search.add_argument("--devices", type=_positive, required=True, help="the number of devices")
    search.add_argument("--axes", default=axes, help=f"mesh axes (default {axes})")
    search.add_argument("--hardware", metavar="NAME", required=True, help="a profile, such as h100 or tpu-v5p")
    search.add_argument("--choice", action="append", default=[], metavar="NAME=V,...", help="of build: micro=8,16")
    top = default["top"]
    search.add_argument("--top", type=_positive, default=top, help=f"how many rows are certain (default {top})")
    search.add_argument("--most", type=_positive, help="the most meshes to trace")
    search.add_argument("--json", action="store_true", help="print JSON")


def _add_launch(commands: Any) -> None:
    launch = _command(
        commands,
        "launch",
        "start a program as several processes",
        "Start a program as several processes on this machine. Their lines are printed with their ranks.\n"
        "When one fails, its error is printed first and last, and the others end. Ctrl-C reaches all of them and\n"
        "leaves them 30 s to save. The program calls spmd.cluster.initialize().",
    )
    launch.add_argument("-n", "--processes", dest="count", type=_positive, required=True, help="processes on this host")
    launch.add_argument("--devices", type=_positive, default=0, help="virtual CPU devices of each process")
    launch.add_argument("--hosts", metavar="A,B", help="print the command for each of these hosts")
    launch.add_argument("--host", type=int, metavar="I", help="start the part of host I, as those commands do")
    launch.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens")
    launch.add_argument(
        "--max-restarts", type=_positive, default=0, metavar="N", help="start all again so often when one fails"
    )
    launch.add_argument("-m", dest="module", nargs=argparse.REMAINDER, default=[], help="a module and its arguments")
    launch.add_argument("program", nargs=argparse.REMAINDER, help="a file and its arguments: train.py --lr 0.1")


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"a positive number, not {text!r}")
    return int(text)


def _add_mesh_and_sizes(parser: argparse.ArgumentParser, needed: bool = True) -> None:
    many = {"action": "append", "default": [], "metavar": "NAME=N,..."}
    parser.add_argument("--mesh", **many, required=needed, help="mesh axes in order: dp=2,tp=4; may be repeated")
    parser.add_argument("--size", **many, help="global sizes of names: b=8,d=16; may be repeated")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--svg", metavar="FILE", help="save the picture: .svg, .html or .txt")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(options: argparse.Namespace) -> int:
    """Run the command that was parsed."""
    from spmd._cli.commands import (
        run_check,
        run_explain,
        run_launch,
        run_plan,
        run_port,
        run_rules,
        run_search,
        run_show,
    )

    run = {
        "plan": run_plan,
        "show": run_show,
        "explain": run_explain,
        "check": run_check,
        "port": run_port,
        "search": run_search,
        "rules": run_rules,
        "launch": run_launch,
    }
    return run[options.command](options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. The exit status is 0, 2 if the words are wrong, or 130 after Ctrl-C."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words == ["--version"]:  # at once: what follows loads JAX
        print(_VERSION)
        return 0
    from spmd.errors import SpmdError

    parser = _parser()
    options, rest = parser.parse_known_args(words)
    if rest:
        apart = all("=" in one and not one.startswith("-") for one in rest)
        advice = "; commas join them, as in --size b=8,d=16" if apart else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{advice}")
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a pipe gets each line as it comes
    try:
        return _run(options)
    except SpmdError as error:
        print(error.fault, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
