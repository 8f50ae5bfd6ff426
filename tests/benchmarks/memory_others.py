"""Programs for `memory.py --others`: what is not a transformer's loss and gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import spmd
from spmd import nn, parallel
from spmd.fft import fft, ifft
from spmd.stencil import stencil

Program = tuple[Any, tuple[Any, ...]]
MakeMesh = Callable[..., Any]  # as spmd.make_mesh


def _given(mesh: Any, shape: tuple[int, ...], layout: str) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32", sharding=spmd.Layout(layout).sharding(mesh))


def pipeline(make_mesh: MakeMesh, order: str, repeats: int | None = None) -> Program:
    """Four stages of three layers and eight micro-batches."""
    mesh, d = make_mesh(pp=4, dp=2), 256
    stack = "p/pp" if repeats is None else "v p/pp"
    lead = (4, 3) if repeats is None else (repeats, 4, 3)
    layouts = f"{stack} l d f", f"{stack} l f d", "d", "m b/dp d"

    @spmd.kernel(in_layouts=layouts, out_layouts="scalar", mesh=mesh)
    def total(up: Any, down: Any, head: Any, x: Any) -> Any:
        def stage(w: Any, x: Any) -> Any:
            return lax.scan(lambda x, w: (x + jax.nn.gelu(x @ w[0]) @ w[1], None), x, w)[0]

        def loss(head: Any, y: Any, target: Any) -> Any:
            return jnp.sum((y @ head) ** 2)

        options: dict[str, Any] = {"pp": "pp", "data": "dp", "order": order, "repeats": repeats}
        return parallel.pipeline_loss(stage, loss, (up, down), head, x, None, **options)

    shapes = (*lead, d, 2 * d), (*lead, 2 * d, d), (d,), (8, 64, d)
    args = tuple(_given(mesh, *one) for one in zip(shapes, layouts, strict=True))
    return jax.jit(jax.value_and_grad(total, (0, 1, 2, 3))), args


def latent(make_mesh: MakeMesh, x: str, sp: str | None) -> Program:
    mesh, d, h = make_mesh(dp=2, tp=4), 256, 8
    layouts = "d h/tp q", "d z", "c h/tp n", "c h/tp v", "h/tp v d"

    @spmd.kernel(in_layouts=(x, nn.LatentWeights(*layouts)), out_layouts=x, mesh=mesh)
    def layer(x: Any, w: Any) -> Any:
        return x + nn.latent_attention(x, w, frequencies=nn.rotary_frequencies(16), tp="tp", sp=sp)

    shapes = (d, h, 48), (d, 80), (64, h, 32), (64, h, 32), (h, 32, d)
    weights = nn.LatentWeights(*(_given(mesh, *one) for one in zip(shapes, layouts, strict=True)))
    return jax.jit(jax.value_and_grad(lambda x, w: (layer(x, w) ** 2).sum(), (0, 1))), (
        _given(mesh, (4, 512, d), x),
        weights,
    )


def waves(make_mesh: MakeMesh, remat: bool) -> Program:
    """Twenty steps of a wave, and their gradient."""
    mesh = make_mesh(a=4, b=2)

    def five_points(u: Any) -> Any:
        return u[2:, 1:-1] + u[:-2, 1:-1] + u[1:-1, 2:] + u[1:-1, :-2] - 4 * u[1:-1, 1:-1]

    laplace = stencil(five_points, "1+x/a+1 1+y/b+1 -> x/a y/b", edge="periodic")

    @spmd.kernel("x/a y/b, x/a y/b -> scalar", mesh=mesh)
    def run(u: Any, c: Any) -> Any:
        def step(carry: Any, _: Any) -> Any:
            u, before = carry
            return (2 * u - before + c**2 * laplace(u), u), None

        (u, _), _ = lax.scan(jax.checkpoint(step) if remat else step, (u, u), length=20)
        return spmd.reduce(u**4, "x/a y/b -> scalar")

    field = _given(mesh, (1024, 1024), "x/a y/b")
    return jax.jit(jax.value_and_grad(run, (0, 1))), (field, field)


def spectra(make_mesh: MakeMesh, grad: bool) -> Program:
    """To a spectrum and back."""
    mesh = make_mesh(a=8)

    @spmd.kernel("x/a y z, x/a y z -> scalar", mesh=mesh)
    def run(u: Any, weights: Any) -> Any:
        f = fft(u, "x/a y z -> kx ky/a kz")
        back = ifft(jnp.tanh(jnp.abs(f)) * f, "kx ky/a kz -> x/a y z")
        return spmd.reduce((back.real * weights) ** 2, "x/a y z -> scalar")

    field = _given(mesh, (128, 128, 128), "x/a y z")
    return (jax.jit(jax.value_and_grad(run, (0, 1))) if grad else run), (field, field)


OTHERS: dict[str, Callable[[MakeMesh], Program]] = {
    "pipeline_loss, 1f1b": lambda make: pipeline(make, "1f1b"),
    "pipeline_loss, eager-1f1b": lambda make: pipeline(make, "eager-1f1b"),
    "pipeline_loss, zb-h1": lambda make: pipeline(make, "zb-h1"),
    "pipeline_loss, two rounds": lambda make: pipeline(make, "1f1b", 2),
    "latent attention, dp x tp": lambda make: latent(make, "b/dp s d", None),
    "latent attention, dp x sp": lambda make: latent(make, "b/dp s/tp d", "tp"),
    "waves": lambda make: waves(make, remat=False),
    "waves, checkpoint": lambda make: waves(make, remat=True),
    "spectra": lambda make: spectra(make, grad=False),
    "spectra, gradient": lambda make: spectra(make, grad=True),
}
