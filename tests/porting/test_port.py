"""`spmd.port`: what is printed, and what both programs are compared on."""

import textwrap
from pathlib import Path

import pytest

import spmd
from spmd.errors import SpmdError
from tests.porting.programs import mapped, ported

SUM = mapped(["lax.psum(x.sum(1), 'tp')"], "(P('dp', 'tp'),)", "P('dp')")


def test_what_is_printed(tmp_path):
    text = str(ported(tmp_path, SUM, (4, 8)))
    assert '@spmd.kernel("b/dp d/tp -> b/dp", mesh=mesh)\n    def program(x):' in text
    assert "raw.py:" in text and "results: equal" in text and "gradients: equal" in text
    assert "sent for results: 1 collectives" in text and "spmd.check: no findings: proved" in text


def test_the_whole_file_runs_with_its_imports(tmp_path):
    found = ported(tmp_path, SUM, (4, 8))
    assert found.file.count("import spmd\n") == 1
    names = {}
    exec(found.file, names)
    fn, args = names["build"](spmd.make_mesh(dp=2, tp=4))
    assert (fn(*args) == found.fn(*found.args)).all()


def test_axes_that_stay_with_the_compiler(tmp_path):
    body = """
    def body(x):
        return lax.psum(x.sum(1), "tp")

    program = jax.jit(
        jax.shard_map(body, mesh=mesh, axis_names={"tp"}, in_specs=P(None, "tp"), out_specs=P())
    )
    """
    found = ported(tmp_path, body, (4, 8))
    assert 'spmd.kernel("d f/tp -> d", mesh=mesh, auto="dp")(body)' in found.text and not found.differences


def test_a_product_of_two_sums_is_told_by_what_is_wrong_with_it(tmp_path):
    """Where the kernel refuses the body, its shard_map stays, and JAX types nothing in that."""
    body = """
    def body(x, w):
        return lax.psum(jnp.einsum("bd,ef->bf", x, w), "tp")

    specs = (P(None, "tp"), P("tp"))
    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check_VMA=False))
    """
    found = ported(tmp_path, body.replace("VMA", "vma"), (4, 8), (8, 3))
    [said] = found.said
    assert not said.text and "because check_vma is off" in said.why
    assert "multiply two such sums after one of them is complete" in str(found) and "copies" not in str(found)


def test_what_each_device_does_with_its_own_block_is_a_question(tmp_path):
    body = """
    def body(x):
        return lax.pmin(x[0], "tp")

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P()))
    """
    text = str(ported(tmp_path, body, (4, 3)))
    assert "meant per shard? The raw program depends on the sizes of axes too" in text


def test_a_gradient_in_the_body_is_told(tmp_path):
    body = """
    def body(w, x):
        return lax.pmean(jax.grad(lambda w: ((x @ w) ** 2).mean())(w), "dp")

    program = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check_VMA=False)
    )
    """
    found = ported(tmp_path, body.replace("VMA", "vma"), (3,), (8, 3))
    assert "shard_map stays" in str(found) and "a gradient is taken in the body" in str(found)
    assert not found.differences


def test_what_differs_is_told(tmp_path):
    """A program that computes something else in each trace."""
    body = """
    import itertools
    turns = itertools.count(1)

    def body(x):
        return lax.psum(x.sum(1), "tp") * next(turns)

    program = jax.shard_map(body, mesh=mesh, in_specs=P("dp", "tp"), out_specs=P("dp"))
    """
    found = ported(tmp_path, body, (4, 8))
    assert {one.split(":")[0] for one in found.differences} >= {"result", "gradient of args[0]"}
    assert any("in both" in one for one in found.same)


def test_a_file_is_rewritten_in_place_and_its_program_is_not_run(tmp_path):
    """Calls inside of calls, bytes that are no ASCII, a decorator that is a partial, and the import behind JAX's."""
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom functools import partial\nimport jax\n"
        "import jax.numpy as jnp\nfrom jax import lax\nfrom jax.sharding import PartitionSpec as P\n\n"
        "@dataclass\nclass A:\n    x: 'int'\n\n"
        "def build(mesh):\n    é = A(1).x\n"
        "    @partial(jax.shard_map, mesh=mesh, in_specs=P('dp', 'tp'), out_specs=P())\n"
        "    def one(x):\n        return lax.psum(jnp.sum(lax.psum(x.sum(1), 'tp') * é), 'dp')\n"
        "    return one, (jnp.ones((4, 8)),)\n\nif __name__ == '__main__':\n    1 / 0\n"
    )
    (tmp_path / "raw.py").write_text(text)
    found = spmd.port(f"{tmp_path / 'raw.py'}:build", mesh=spmd.make_mesh(dp=2, tp=4))
    assert not found.differences and "spmd.psum(jnp.sum(spmd.psum(x.sum(1)" in found.text and " * é" in found.text
    assert "import jax.numpy as jnp\nimport spmd\n" in found.file and found.file.endswith("    1 / 0\n")


def test_a_program_without_a_raw_shard_map(tmp_path):
    with pytest.raises(SpmdError, match=r"calls no raw jax\.shard_map"):
        ported(tmp_path, "program = jax.jit(jnp.sin)", (4,))


def test_each_of_starred_arguments_has_its_layout(tmp_path):
    body = (
        "def local(w, *args):\n    return jax.tree.map(lambda x: lax.psum(x.sum(0) * w, 'dp'), args)\n"
        "program = jax.shard_map(local, mesh=mesh, in_specs=(P(), P('dp'), P('dp')), out_specs=P())"
    )
    found = ported(tmp_path, body, (3,), (4, 3), (8, 3), names=["d", "b d", "n d"])
    assert 'spmd.kernel("d, b/dp d, n/dp d -> d, d", mesh=mesh)(local)' in found.text, found
    assert not found.differences and "results: equal" in found.same


def test_arguments_of_a_class_of_the_file(tmp_path):
    body = """
    from dataclasses import dataclass

    @functools.partial(jax.tree_util.register_dataclass, data_fields=["w"], meta_fields=[])
    @dataclass
    class Params:
        w: jax.Array

    def body(p, x):
        return lax.psum(x @ p.w, "tp")

    inner = jax.shard_map(body, mesh=mesh, in_specs=(Params(P("tp")), P("dp", "tp")), out_specs=P("dp"))
    program = jax.jit(lambda w, x: inner(Params(w), x))
    """
    found = ported(tmp_path, body, (8, 3), (4, 8))
    assert not found.differences and 'spmd.psum(x @ p.w, "b/dp' in found.text
    assert any("an argument's attribute has no string" in note for note in found.notes)


def test_a_gradient_that_the_kernel_does_not_have(tmp_path):
    body = """
    @functools.partial(jax.custom_vjp)
    def summed(x):
        return lax.psum(x, "tp")

    summed.defvjp(lambda x: (lax.psum(x, "tp"), None), lambda _, g: (g,))

    def body(x, w):
        return summed(x @ w)

    program = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P(), check_VMA=False)
    )
    """.replace("VMA", "vma")
    found = ported(tmp_path, body, (4, 8), (8, 3))
    assert not found.differences and "must produce an output with the same type" in str(found)


def test_a_program_that_takes_the_gradient(tmp_path):
    body = """
    loss = jax.shard_map(
        lambda x: lax.psum((x**2).sum(), "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P()
    )
    program = jax.jit(jax.grad(loss))
    """
    with pytest.raises(SpmdError, match="takes the gradient of a shard_map"):
        ported(tmp_path, body, (8,))


def test_a_ragged_exchange_stays_and_the_verb_for_it_is_named(tmp_path):
    """On a CPU XLA cannot run it: the port says so, and neither side raises."""
    body = (
        "def program(x, n):\n"
        "    every = lax.all_gather(n[0], 'tp')\n"
        "    me = lax.axis_index('tp')\n"
        "    base = (jnp.cumsum(every, 0) - every)[me]\n"
        "    out = lax.pcast(jnp.zeros((16, 3)), 'tp', to='varying')\n"
        "    start = jnp.cumsum(n[0]) - n[0]\n"
        "    return lax.ragged_all_to_all(x, out, start, n[0], base, every[:, me], axis_name='tp')\n"
        "program = jax.shard_map(program, mesh=mesh, in_specs=(P('tp'), P('tp')), out_specs=P('tp'))"
    )
    path = tmp_path / "raw.py"
    head = "import jax\nimport jax.numpy as jnp\nfrom jax import lax\nfrom jax.sharding import PartitionSpec as P\n"
    args = "(jnp.ones((16, 3)), jnp.ones((4, 4), jnp.int32))"
    path.write_text(f"{head}\ndef build(mesh):\n{textwrap.indent(body, '    ')}\n    return program, {args}\n")
    found = spmd.port(f"{path}:build", mesh=spmd.make_mesh(tp=4))
    [stays] = [one for one in found.said if "ragged" in one.raw]
    assert not stays.text and "spmd.exchange(rows, owner, layout)" in stays.why
    assert any("UNIMPLEMENTED" in one for one in found.same) and not found.differences


def test_a_function_is_no_file_and_is_told_its_own(mesh):
    """It ended in AttributeError: no attribute 'rpartition'."""
    with pytest.raises(SpmdError) as caught:
        spmd.port(ported, mesh=mesh)
    assert "not a function" in caught.value.fault.rule
    assert caught.value.fault.advice.endswith('programs.py:ported", ...)')
    for other in (None, 3, b"a.py:build", Path("a.py")):
        with pytest.raises(SpmdError, match=r"FILE:NAME as a string"):
            spmd.port(other, mesh=mesh)
