"""What else a kernel needs."""

from tests.porting.programs import ported

RING = """
    def body(x):
        n, me = lax.psum(1, "tp"), lax.axis_index("tp")

        def step(i, carry):
            total, x = carry
            return total + x, lax.ppermute(x, "tp", [(j, (j + 1) % n) for j in range(n)])

        return lax.fori_loop(0, n, step, (jnp.zeros(x.shape), x))[0] + 0 * me.astype(x.dtype)

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"), check_VMA=False))
""".replace("VMA", "vma")

PALLAS = """
    from jax.experimental import pallas as pl

    def double(ref, out):
        out[...] = 2 * ref[...]

    def body(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pl.pallas_call(double, out_shape=shape, interpret=True)(x)

    program = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"), check_VMA=False))
""".replace("VMA", "vma")


def test_a_loop_starts_with_what_varies(tmp_path):
    found = ported(tmp_path, RING, (8, 3))
    assert 'jax.lax.pcast(jnp.zeros(x.shape), "tp", to="varying")' in found.text
    assert 'spmd.axis_size("tp"), spmd.axis_index("tp")' in found.text
    assert not found.differences


def test_a_pallas_call_has_layouts(tmp_path):
    found = ported(tmp_path, PALLAS, (4, 3))
    assert "spmd.opaque(lambda x: pl.pallas_call(" in found.text and '"b/dp d -> b/dp d")(x)' in found.text
    assert not found.differences and not found.notes
