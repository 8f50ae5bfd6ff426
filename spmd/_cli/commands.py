"""The commands behind `python -m spmd`: what each prints, and how `x=4,y=2` is read."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from spmd._cli.programs import builder, check_names, loaded, maker, program, shown_if_slow
from spmd._text import Table
from spmd.accelerators import PRESETS, topology_devices
from spmd.checker import rules
from spmd.cluster._launch import COORDINATOR_PORT, Launch, checked_command, free_port, launch, per_host
from spmd.comm._planned import PREFER
from spmd.comm.plans import plan
from spmd.drawing import Picture
from spmd.errors import CommunicationError, LayoutError, MeshError, SizeError, SpmdError, did_you_mean
from spmd.inspect._check import check
from spmd.inspect._explanation import explain
from spmd.inspect._picture import visualize
from spmd.language import Layout, Pattern
from spmd.mesh import make_mesh, use_cpu_devices
from spmd.porting import port
from spmd.propagation import Propagation, propagate
from spmd.searcher._search import search

_SHORT = re.compile(r"(bf|f|i|s|u)(\d+)")
_KINDS = {"bf": "bfloat", "f": "float", "i": "int", "s": "int", "u": "uint"}


def named_numbers(flag: str, texts: Iterable[str]) -> dict[str, int]:
    """`["x=4,y=2", "z=3"]` as `{"x": 4, "y": 2, "z": 3}`, in the order written.

    Raises:
      SizeError: A part is not of the form name=number, or a name occurs twice.

    >>> named_numbers("--mesh", ["x=4,y=2", "z=3"])
    {'x': 4, 'y': 2, 'z': 3}
    """
    found: dict[str, int] = {}
    for part in ",".join(texts).split(","):
        name, equals, number = (one.strip() for one in part.partition("="))
        call = f"{flag} {','.join(texts)}"
        if not part.strip():
            continue
        if not equals or not name.isidentifier() or not re.fullmatch(r"0*[1-9][0-9]*", number):
            rule = f"{flag} takes names with positive numbers, not '{part.strip()}'."
            advice = f"as in {flag} {'dp=2,tp=4' if flag == '--mesh' else 'b=8,d=16'}"
            raise SizeError(rule, call=call, advice=advice)
        if name in found:
            raise SizeError(f"{flag} takes each name once, but '{name}' occurs twice.", call=call)
        found[name] = int(number)
    return found


def dtype_name(text: str) -> str:
    """`bf16` as `bfloat16`; other names as they are.

    >>> dtype_name("bf16"), dtype_name("f32"), dtype_name("float8_e4m3fn")
    ('bfloat16', 'float32', 'float8_e4m3fn')
    """
    short = _SHORT.fullmatch(text)
    return f"{_KINDS[short[1]]}{short[2]}" if short else text


def run_plan(options: Any) -> int:
    """`plan`: the table of a plan, its picture, or JSON."""
    mesh, sizes, dtype = _mesh(options), named_numbers("--size", options.size), _dtype(options.dtype)
    _check_choice("--prefer", options.prefer, PREFER)
    _check_choice("--hardware", options.hardware, PRESETS)
    if options.hardware is None and options.prefer == "latency":
        rule = "--prefer latency weighs steps by what the links of the mesh take, so it needs a hardware profile."
        raise CommunicationError(rule, call="--prefer latency", advice="as in --hardware h100")
    _check_all_sizes(options.pattern, sizes)
    found = plan(options.pattern, sizes=sizes, mesh=mesh, dtype=dtype, prefer=options.prefer, hardware=options.hardware)
    picture = visualize(found)
    _save(picture, options.svg)
    _print(_json(picture.to_dict()) if options.json else str(found))
    if options.picture and not options.json:
        _print("")
        _show(picture)
    return 0


def run_show(options: Any) -> int:
    """`show`: the picture of a layout, or JSON."""
    mesh, sizes, text = _mesh(options), named_numbers("--size", options.size), options.layout
    if "->" in text:
        rule = "show draws one layout; the picture of a change of layout is that of its plan."
        advice = f'plan "{text}" --mesh {_joined(mesh)} --size ... --picture'
        raise LayoutError(rule, call=f'show "{text}"', advice=advice)
    if "..." in text:
        rule = "A picture needs every dimension, and '...' stands for any number of them."
        raise LayoutError(rule, call=f'show "{text}"', advice="write the dimensions out")
    check_names("layout", Layout(text, call=f'show "{text}"').names, sizes)
    picture = visualize(text, sizes, mesh)
    _save(picture, options.svg)
    if options.json:
        _print(_json(picture.to_dict()))
    else:
        _show(picture)
    return 0


def run_rules(options: Any) -> int:
    """`rules`: what the checker knows of each primitive, or JSON."""
    found = rules()
    if options.json:
        _print(_json(found._asdict()))
        return 0
    table = [(name, *row) for name, row in found.table.items()]
    tables = [
        Table(table, ("primitive", "dimensions", "partial sum")),
        Table(list(found.partial.items()), ("partial sum", "what becomes of it")),
        Table(list(found.own.items()), ("primitive", "a rule of its own")),
    ]
    _print("\n\n".join(one.text() for one in tables))
    return 0


def run_explain(options: Any) -> int:
    """`explain`: what a program sends, or JSON."""
    fn, args = _program(options)
    _check_choice("--hardware", options.hardware, PRESETS)
    compiles = options.compile or options.target
    with shown_if_slow(f"{'compiling' if compiles else 'reading'} {options.program}"):
        found = explain(fn, *args, hardware=options.hardware, layouts=options.layouts)
    _print(_json(found.to_dict()) if options.json else str(found))
    return 0


def run_search(options: Any) -> int:
    """`search`: the meshes that suit a program best, or JSON."""
    _check_choice("--hardware", options.hardware, PRESETS)
    choices = {}
    for word in options.choice:
        name, equals, values = word.partition("=")
        if not equals or not name.isidentifier() or not values:
            rule = f"--choice takes a name with values, not '{word}'."
            raise SpmdError(rule, call=f"--choice {word}", advice="as in --choice micro=8,16")
        choices[name] = [int(value) if value.isdecimal() else value for value in values.split(",")]
    axes = [one for one in options.axes.split(",") if one]
    words = {name: getattr(options, name) for name in ("devices", "hardware", "top", "most")}
    with shown_if_slow(f"searching {options.program}") as progress:
        found = search(builder(options.program), **words, axes=axes, choices=choices, progress=progress)
    _print(_json(found.to_dict()) if options.json else str(found))
    return 0


def run_check(options: Any) -> int:
    """`check`: the findings of a program, or JSON, and its lines with their layouts.

    It returns 1 if there are any that are certain, and with `--strict` 3 if numbers could not be compared.
    """
    fn, args = _program(options)
    reference = loaded(options.reference) if options.reference else None
    build = maker(options.program) if options.mesh and options.layouts is None else None
    with shown_if_slow(f"checking {options.program}"):
        found = check(fn, *args, reference=reference, build=build)
    plan = _planned(fn, args, options.layouts) if not found and found.verdict.kind in ("", "typed") else None
    source = {"source": str((found if plan is None else plan).source())} if options.source else {}
    if options.json:
        planned = {} if plan is None else {"plan": plan.to_dict()}
        _print(_json(found.to_dict() | source | planned))
    else:
        _print("\n\n".join([*source.values(), str(found), *([] if plan is None else [str(plan)])]))
    untested = options.strict and found.verdict.kind not in ("proved", "tested", "typed")
    return 1 if any(one.certain for one in found) else 3 if untested else 0


def run_port(options: Any) -> int:
    """`port`: a program with raw `shard_map`s as kernels. It returns 1 if both do not give the same."""
    axes: dict[str, Any] = dict(named_numbers("--mesh", options.mesh))
    use_cpu_devices(math.prod(axes.values()))
    mesh, args = make_mesh(**axes), ()
    names = [one.strip() for one in options.names.split(",")] if options.names else ()
    with shown_if_slow(f"porting {options.program}"):
        if options.layouts is not None:
            sizes = named_numbers("--size", options.size)
            _, args = program(options.program, mesh, sizes, _dtypes(options), options.layouts)
        found = port(options.program, *args, mesh=None if args else mesh, names=names)
    _print(str(found))
    return 1 if found.differences else 0


def _planned(fn: Any, args: Sequence[Any], layouts: str | None) -> Propagation | None:
    """The compiler's plan of a program without kernels; None if no mesh divides the program."""
    try:
        return propagate(fn, *args, layouts=layouts)
    except MeshError:
        return None


def _program(options: Any) -> tuple[Any, tuple[Any, ...]]:
    """The program that the words name, and its arguments. The mesh has devices only where it is compiled."""
    axes: dict[str, Any] = dict(named_numbers("--mesh", options.mesh))
    sizes = named_numbers("--size", options.size)
    compiles, target = getattr(options, "compile", False), getattr(options, "target", None)
    count = math.prod(axes.values())
    if target and not axes:
        rule = "the devices of a target make a mesh, and no mesh is given."
        raise SpmdError(rule, call=f"--target {target}", advice="--mesh dp=2,tp=4")
    if (compiles or target) and axes:
        use_cpu_devices(1 if target else count)
    devices = topology_devices(target, count) if target else None
    mesh = make_mesh(abstract=not (compiles or target), devices=devices, **axes) if axes else None
    with shown_if_slow(f"loading {options.program}"):
        return program(options.program, mesh, sizes, _dtypes(options), options.layouts)


def _dtypes(options: Any) -> dict[str, str]:
    """The dtype of each argument by its name; "" for all others."""
    words = (word.rpartition("=") for word in options.dtype)
    return {name: _dtype(text) for name, _, text in words}


def run_launch(options: Any) -> int:
    """`launch`: the processes of a program on this host; it returns the exit code of the first that fails."""
    hosts = [host for host in (options.hosts or "").split(",") if host]
    first = options.count * (options.host or 0)
    default = f"{hosts[0]}:{COORDINATOR_PORT}" if hosts else f"localhost:{free_port()}"
    total = options.count * max(len(hosts), 1)
    command = checked_command(["-m", *options.module] if options.module else options.program)
    plan = Launch(command, options.count, options.devices, first, total, options.coordinator or default)
    if hosts and options.host is None:
        _print("\n".join(per_host(plan, hosts)))
        return 0
    return launch(plan, options.max_restarts)


# --- what is wrong with the options, in their own words ------------------------------------------------------


def _mesh(options: Any) -> dict[str, int]:
    mesh = named_numbers("--mesh", options.mesh)
    if not mesh:
        call = f"--mesh {','.join(options.mesh)}"
        raise MeshError("A mesh has at least one axis.", call=call, advice="as in --mesh dp=2,tp=4")
    return mesh


def _dtype(text: str) -> str:
    name = dtype_name(text)
    try:
        jnp.dtype(name)
    except TypeError:
        rule = f"--dtype is the type of the elements, not '{text}'."
        raise CommunicationError(rule, call=f"--dtype {text}", advice="as in --dtype bf16") from None
    return name


def _check_choice(flag: str, text: str | None, known: Sequence[str]) -> None:
    if text is not None and text not in known:
        rule = f"{flag} is one of {', '.join(known)}, not '{text}'{did_you_mean(text, known) or '.'}"
        raise CommunicationError(rule, call=f"{flag} {text}")


def _check_all_sizes(text: str, sizes: Mapping[str, int]) -> None:
    """Check that each name of the pattern has a size. `plan` itself finds the other faults."""
    pattern = Pattern(text, arrow=True, call=f'plan("{text}")')
    check_names("pattern", pattern.names, sizes)
    sides = [layout.names for layout in pattern.layouts]
    missing = [name for name in pattern.names if name not in sizes and all(name in side for side in sides)]
    if missing:
        rule = f"a plan needs every size, and the size of {' and '.join(missing)} is not given."
        raise SizeError(rule, call=f'plan "{text}"', advice=f"as in --size {','.join(f'{n}=4096' for n in missing)}")


def _joined(numbers: Mapping[str, int]) -> str:
    return ",".join(f"{name}={number}" for name, number in numbers.items())


# --- printing ------------------------------------------------------------------------------------------------


def _save(picture: Picture, path: str | None) -> None:
    if path is None:
        return
    try:
        picture.save(path)
    except SpmdError:
        rule = "A picture is saved as .svg, .html or .txt."
        raise SpmdError(rule, call=f"--svg {path}", advice="as in --svg picture.svg") from None
    except OSError as error:
        raise SpmdError(f"The file cannot be written: {error.strerror}.", call=f"--svg {path}") from None


def _show(picture: Picture) -> None:
    """Print a picture, in colours if the terminal has them and `rich` is installed."""
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        try:
            from rich.console import Console
        except ImportError:
            pass
        else:
            Console().print(picture)
            return
    _print(str(picture))


def _json(found: Any) -> str:
    return json.dumps(found, indent=2)


def _print(text: str) -> None:
    """Print a text, with plain characters if the terminal does not have those of boxes."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        text = text.translate({ord(char): plain for char, plain in zip("─│┌┬┐├┼┤└┴┘", "-|+++++++++", strict=True)})
        text = text.encode(encoding, "replace").decode(encoding)
    print(text)
