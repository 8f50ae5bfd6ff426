"""How much memory eight layers need whose weights are gathered early, late, and in the time of the layer before.

python -m tests.ops.temporaries
"""

import jax
import jax.numpy as jnp

import spmd

LAYERS, SIZE = 8, 512


def gather(w):
    return spmd.all_gather(w, "d/dp f -> d f")


def early(x, weights):
    now = gather(weights[0])
    for i in range(LAYERS):
        then = gather(weights[i + 1]) if i + 1 < LAYERS else now
        x, now = jnp.tanh(x @ now), then
    return x


def late(x, weights):
    for w in weights:
        x = jnp.tanh(x @ gather(w))
    return x


def meanwhile(x, weights):
    now = gather(weights[0])
    for w in weights[1:]:
        x, now = spmd.meanwhile(lambda x, now=now: jnp.tanh(x @ now), x, gather, w)
    return jnp.tanh(x @ now)


def main() -> None:
    spmd.use_cpu_devices(8)
    mesh = spmd.make_mesh(dp=8)
    layouts = ("b/dp d", ["d/dp f"] * LAYERS)
    args = jnp.ones((64, SIZE)), [jnp.ones((SIZE, SIZE))] * LAYERS
    print("jax", jax.__version__)
    for fn in (early, late, meanwhile):
        kernel = spmd.kernel(in_layouts=layouts, out_layouts="b/dp d", mesh=mesh)(fn)
        compiled = jax.jit(kernel).lower(*args).compile()
        print(f"{fn.__name__:10} {compiled.memory_analysis().temp_size_in_bytes:>10,} bytes of temporaries")


if __name__ == "__main__":
    main()
