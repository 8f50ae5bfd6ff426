"""Programs that the command line names: `FILE:KERNEL`, or `FILE:build` with a function that makes one for a mesh. And
what is shown while they take long."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import math
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from spmd._python.named import module_name
from spmd._trees.leaves import kind_of
from spmd.errors import LayoutError, SizeError, SpmdError, did_you_mean
from spmd.inspect._program import building
from spmd.kernels import Kernel
from spmd.language import Layout

_BUILD = "FILE:build with def build(mesh): return fn, args"


def program(
    target: str, mesh: Any, sizes: Mapping[str, int], dtypes: Mapping[str, str], layouts: str | None = None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function and its arguments, from the name of a kernel or of a function `build`.

    Args:
      target: `FILE:NAME`. What has this name is a kernel whose arguments each have one layout, or a function from a
        mesh to `(fn, args)` or `(fn, args, bound)`.
      mesh: The mesh; None for the kernel's own.
      sizes: The sizes of the names in the kernel's layouts.
      dtypes: The dtype of each argument by its name; "" for all others.
      layouts: The layouts of the arguments of a plain function of arrays, which what has the name is then.

    Returns:
      The function, and its arguments as `explain` and `check` take them.

    Raises:
      SpmdError: If the file or the name does not exist, or is of another kind.
      SizeError: If a size is missing, or belongs to no name.
      LayoutError: If an argument of the kernel is a tree, or not an array.
    """
    found = loaded(target)
    if layouts is not None:
        return found, _plain_arguments(found, layouts, mesh, sizes, dtypes)
    if isinstance(found, Kernel):
        return (found if mesh is None else found.on(mesh)), _arguments(found, sizes, dtypes)
    if mesh is None:
        raise SpmdError(f"{target} is a function from a mesh, and no mesh is given.", call=target, advice="--mesh dp=2")
    if sizes or dtypes:
        rule = f"{target} makes its own arguments, so no sizes and dtypes are given."
        raise SpmdError(rule, call=target, advice="leave out --size and --dtype")
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    devices = f";\nor devices, in {target}: spmd.use_cpu_devices({mesh.size}), and mesh = spmd.make_mesh({axes})"
    with building(target, mesh, devices):
        made = found(mesh)
    fits = isinstance(made, tuple) and len(made) in (2, 3) and callable(made[0]) and isinstance(made[1], tuple | list)
    if not fits:  # the third, a Bound, is for `search` alone
        rule = f"{target} returns a function and its arguments, and a Bound if it likes, not {kind_of(made)}."
        raise SpmdError(rule, call=target, advice=_BUILD)
    return made[0], tuple(made[1])


def builder(target: str) -> Callable[..., Any]:
    """A function from a mesh to a program, by its name `FILE:build`.

    Raises:
      SpmdError: If the file or the name does not exist, or is a kernel.
    """
    found = loaded(target)
    if isinstance(found, Kernel):
        rule = f"{target} is a kernel, and a search needs a function that makes a program for each mesh."
        raise SpmdError(rule, call=target, advice=_BUILD)
    return found


def maker(target: str) -> Callable[..., Any] | None:
    """The function from a mesh that a file which is loaded calls by this name; None for a kernel."""
    path, _, name = target.rpartition(":")
    found = vars(sys.modules[module_name(path)[0]])[name]
    return None if isinstance(found, Kernel) else found


def check_names(what: str, names: Collection[str], sizes: Mapping[str, int]) -> None:
    """Check that each size of the command belongs to a name of a layout, a pattern or a kernel."""
    for name in sizes:
        if name not in names:
            rule = f"the {what} has no dimension '{name}'{did_you_mean(name, names) or '.'}"
            call = f"--size {','.join(f'{name}={size}' for name, size in sizes.items())}"
            raise SizeError(rule, call=call, got=[f"dimensions of the {what}: {', '.join(names) or 'none'}"])


def loaded(target: str) -> Any:
    """Return what a file calls by this name. The file is run as a module, so nothing under `__main__` happens."""
    text, _, name = target.rpartition(":")
    path = Path(text)
    if not text or not name:
        raise SpmdError("a program is a file and a name in it.", call=target, advice="as in train.py:step")
    if not path.is_file():
        raise SpmdError(f"there is no file {text}.", call=target)
    full_name, folder = module_name(path)
    spec = importlib.util.spec_from_file_location(full_name, path)
    if spec is None or spec.loader is None:
        raise SpmdError(f"{text} is not a Python file.", call=target, advice="as in train.py:step")
    sys.path[:] = [folder, *sys.path, str(path.parent.resolve())]  # the second for a script beside a package's files
    module = sys.modules[full_name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = vars(module).get(name)
    if not callable(found):
        kernels = [one for one, value in vars(module).items() if isinstance(value, Kernel)]
        near = did_you_mean(name, [one for one, value in vars(module).items() if callable(value)]) or "."
        rule = f"{text} has no kernel and no function called {name}{near}"
        raise SpmdError(rule, call=target, got=[f"kernels: {', '.join(kernels) or 'none'}"])
    return found


def _arguments(kernel: Kernel, sizes: Mapping[str, int], dtypes: Mapping[str, str]) -> tuple[Any, ...]:
    """One array without values for each argument of a kernel, with the shape that its layout and the sizes give.

    An argument that is static and has a default is left out.
    """
    signature = kernel.signature
    left_out = {name for name in signature.static if signature.default(name) is not inspect.Parameter.empty}
    layouts: dict[str, Layout] = {}
    for name in (name for name in signature.params if name not in left_out):
        layout = signature.layouts.get(name)
        if not isinstance(layout, Layout) or layout.rank is None:
            rule = f"the shape of the argument {name} does not follow from a layout and sizes."
            raise LayoutError(rule, call=signature.text, advice=_BUILD)
        layouts[name] = layout
    unknown = [name for name in dtypes if name and name not in layouts]
    if unknown:
        rule = f"{signature.name} has no argument {unknown[0]}{did_you_mean(unknown[0], layouts) or '.'}"
        raise SpmdError(rule, call=f"--dtype {unknown[0]}={dtypes[unknown[0]]}")
    known = _known_sizes("kernel", signature.text, layouts, {**dict(signature.sizes), **sizes}, sizes)
    common = dtypes.get("", "float32")
    return tuple(jax.ShapeDtypeStruct(_shape(one, known), dtypes.get(name, common)) for name, one in layouts.items())


def _plain_arguments(
    fn: Any, text: str, mesh: Any, sizes: Mapping[str, int], dtypes: Mapping[str, str]
) -> tuple[Any, ...]:
    """One array without values for each layout, placed on the mesh. A dtype goes to the parameter of its name."""
    if mesh is None:
        raise SpmdError("--layouts place arguments on a mesh, and no mesh is given.", call=text, advice="--mesh dp=2")
    names = list(inspect.signature(fn).parameters)
    parts = [Layout(one.strip(), call=f'--layouts "{text}"') for one in text.split(",")]
    if len(parts) > len(names):
        rule = f"--layouts has {len(parts)} layouts, and the function {len(names)} parameters."
        raise LayoutError(rule, call=f'--layouts "{text}"', got=[f"parameters: {', '.join(names)}"])
    layouts = dict(zip(names, parts, strict=False))
    known = _known_sizes("layouts", f'--layouts "{text}"', layouts, sizes, sizes)
    common = dtypes.get("", "float32")
    return tuple(
        jax.ShapeDtypeStruct(_shape(one, known), dtypes.get(name, common), sharding=one.sharding(mesh))
        for name, one in layouts.items()
    )


def _known_sizes(
    what: str, call: str, layouts: Mapping[str, Layout], known: Mapping[str, int], given: Mapping[str, int]
) -> Mapping[str, int]:
    """The sizes of all names in layouts; an error where one is missing, or belongs to no name."""
    atoms = [atom for layout in layouts.values() for dim in layout.dims for atom in dim.atoms]
    names = dict.fromkeys(atom.name for atom in atoms if atom.size is None)
    check_names(what, names, given)
    missing = [name for name in names if name not in known]
    if missing:
        *some, last = missing
        rule = f"the size of {', '.join(some) + ' and ' if some else ''}{last} is not given."
        raise SizeError(rule, call=call, advice=f"as in --size {','.join(f'{n}=8' for n in missing)}")
    return known


def _shape(layout: Layout, known: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(math.prod(known[a.name] if a.size is None else a.size for a in dim.atoms) for dim in layout.dims)


# --- what a command does, on a terminal, while it takes long --------------------------------------------------------


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
