"""A file that is rewritten in place."""

import ast

from spmd.porting._program import Edit, File, called, loaded

TEXT = """from __future__ import annotations
import jax

def outer(mesh):
    @jax.shard_map(mesh=mesh, in_specs=1, out_specs=1)
    def one(x):
        return g(f(x), é)

    def two(x):
        return x

    three = shard_map(lambda x: x, mesh, 1, 1)
    return one, jax.shard_map(two, mesh=mesh, in_specs=1, out_specs=1), three
"""


def file():
    return File("raw.py", TEXT)


def test_calls_of_shard_map_are_found_with_their_function_and_mesh():
    found = list(file().mapped())
    names = sorted(getattr(one.function, "name", "lambda") for one in found)
    assert names == ["lambda", "one", "two"] and all(ast.unparse(one.mesh) == "mesh" for one in found)


def test_a_partial_of_shard_map_that_decorates():
    text = "@partial(jax.shard_map, mesh=m, in_specs=1, out_specs=1)\ndef f(x):\n    return x\n"
    [one] = File("raw.py", text).mapped()
    assert one.function.name == "f" and one.body is None


def test_edits_inside_of_edits():
    one = file()
    outer = next(n for n in one.nodes if isinstance(n, ast.Call) and called(n) == "g")
    inner = outer.args[0]
    edits = [
        Edit(*one.span(outer), ("h(", one.span(inner), ")")),
        Edit(*one.span(inner), ("k(", one.span(inner.args[0]), ")")),
    ]
    assert "return h(k(x))\n" in one.render(edits) and one.render([]) == TEXT


def test_places_count_bytes():
    one = file()
    name = next(n for n in one.nodes if isinstance(n, ast.Name) and n.id == "é")
    assert one.source(name) == "é"


def test_an_import_goes_behind_that_of_jax():
    one = file()
    assert one.bytes[: one.first_line()].decode().endswith("import jax\n")
    assert one.imports("jax") and not one.imports("spmd")


def test_a_file_is_loaded_without_its_program(tmp_path):
    text = (
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\nif __name__ == '__main__':\n    1 / 0\n"
    )
    assert loaded(str(tmp_path / "a.py"), text)["A"](1).x == 1
