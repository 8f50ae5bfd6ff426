"""Files with raw programs, and what they become."""

import textwrap

import spmd

HEAD = """
import functools
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

"""


def ported(tmp_path, body, *shapes, mesh=None, name="program", **words):
    """The port of a file with a function `program`, `P` and JAX's names imported, and `build` around it."""
    path = tmp_path / "raw.py"
    arrays = ", ".join(
        f"jnp.sin(jnp.arange({' * '.join(map(str, shape)) or 1}.0)).reshape({shape})" for shape in shapes
    )
    build = f"\n\ndef build(mesh):\n{textwrap.indent(textwrap.dedent(body), '    ')}\n    return {name}, ({arrays},)\n"
    path.write_text(HEAD + build)
    return spmd.port(f"{path}:build", mesh=mesh or spmd.make_mesh(dp=2, tp=4), **words)


UNTYPED = ", check_" + "vma=False"


def mapped(lines, specs, out, more=""):
    """The text of a program whose body returns the last of the lines."""
    *first, last = lines
    inside = "".join(f"    {line}\n" for line in [*first, f"return {last}"])
    return (
        f"@jax.jit\n@functools.partial(jax.shard_map, mesh=mesh, in_specs={specs}, out_specs={out}{more})\n"
        f"def program({', '.join('xyz'[: specs.count('P(')])}):\n{inside}"
    )
