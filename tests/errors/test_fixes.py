"""Each `fix:` of the goldens that are no programs: run as a kernel of its own, on arrays that lie as its strings say.

Right numbers, right gradients, and no byte more than the compiler sends. A name of a fix stands for an array of the
layout that its string gives it; a partial sum is made of terms, one for each device. `test_messages.py` has the goldens
that are programs, and `tests/language/test_messages.py` those that are strings.
"""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from tests.checker.pasting import check_pasted
from tests.errors.registry import fixes_of

TESTS = Path(__file__).parents[1]
GOLDENS = [TESTS / room / "messages.txt" for room in ("checker", "kernels", "ops", "comm")]
FIXES = list(dict.fromkeys(fix for golden in GOLDENS for fix in fixes_of(golden.read_text())))
ASKED = 'spmd.iota("(b/dp s/tp)", s=4)', 'spmd.local_size("b/dp")'  # without arrays
CALLS = [fix for fix in FIXES if fix.startswith("spmd.") and fix not in ASKED]


def layouts_of(call: ast.Call) -> dict[str, str]:
    """The names in a call and in those inside it, each with the layout that its string gives it."""
    [pattern] = [x.value for x in call.args if isinstance(x, ast.Constant) and isinstance(x.value, str)]
    arrays = [x for x in call.args if not isinstance(x, ast.Constant)]
    found: dict[str, str] = {}
    for x, layout in zip(arrays, pattern.partition("->")[0].split(","), strict=bool(arrays)):
        inner = x.func.value if isinstance(x, ast.Call) and ast.unparse(x.func).endswith(".astype") else x
        found |= layouts_of(inner) if isinstance(inner, ast.Call) else {ast.unparse(inner): layout.strip()}
    return found


def result_of(fix: str) -> str:
    """The layout of what a call returns."""
    strings = re.findall(r'"([^"]*)"', re.sub(r', op="\w+"', "", fix))
    return re.sub(r"[\[\]]", "", strings[-1].partition("->")[2] or strings[-1]).strip()


def of_terms(layout: str) -> tuple[str, str, tuple[str, ...]]:
    """A layout as arrays outside of a kernel have it, what it is inside, and the axes of a partial sum: these divide a
    dimension of terms."""
    inside = re.sub(r"[\[\]]", "", layout).replace("...", "b")
    axes = tuple(re.findall(r"\w+", "".join(re.findall(r"\{U:([^}]*)\}", inside))))
    plain = re.sub(r"\s*\{U:[^}]*\}", "", inside)
    return " ".join(["/".join(("terms", *axes)), plain]) if axes else plain, inside, axes


def kernel_of(fix: str, mesh: jax.sharding.Mesh) -> tuple[spmd.kernels.Kernel, list[np.ndarray]]:
    """A kernel that runs a fix, and its arguments."""
    call = ast.parse(fix, mode="eval").body
    assert isinstance(call, ast.Call)
    names = layouts_of(call)
    outside = {name: of_terms(layout) for name, layout in names.items()}

    def body(*given: jax.Array) -> jax.Array:
        known = dict(zip(names, given, strict=True))
        for name, (whole, inside, axes) in outside.items():
            known[name] = spmd.reduce(known[name], f"{whole} -> {inside}") if axes else known[name]
        return jnp.asarray(eval(fix, {"spmd": spmd, "jnp": jnp, **known}))

    rng = np.random.default_rng(0)
    arrays = []
    for name, (whole, _, axes) in outside.items():
        terms = [int(np.prod([mesh.shape[axis] for axis in axes]))] if axes else []
        sizes = [*terms, *[8] * (len(spmd.Layout(whole).dims) - len(terms))]
        x = rng.normal(size=sizes).astype(np.float32)
        arrays.append(rng.integers(0, 8, sizes).astype(np.int32) if name == "ids" else x)
    target = result_of(fix).replace("...", "b")
    pattern = f"{', '.join(whole for whole, *_ in outside.values())} -> {target}"
    return spmd.kernel(pattern, mesh=mesh)(body), arrays


@pytest.mark.parametrize("fix", CALLS)
def test_a_fix_gives_the_numbers_and_gradients_of_one_device_and_sends_no_more(fix, mesh):
    kernel, arrays = kernel_of(fix, mesh)
    check_pasted(kernel, arrays)


def test_a_fix_without_arrays_is_what_it_replaces(mesh):
    iota, size = ASKED
    x = np.zeros((8, 4), np.float32)
    in_order = spmd.kernel("b/dp s/tp -> b/dp s/tp", mesh=mesh)(
        lambda x: spmd.rearrange(eval(iota), "(b/dp s/tp) -> b/dp s/tp", s=4).astype(x.dtype) + x
    )
    np.testing.assert_array_equal(in_order(x), np.arange(32).reshape(8, 4))
    check_pasted(in_order, [x])
    rows = spmd.kernel("b/dp s -> b/dp s", mesh=mesh)(lambda x: x + float(eval(size) == x.shape[0]))
    np.testing.assert_array_equal(rows(x), np.ones((8, 4)))


def test_other_numbers_are_noticed(mesh):
    wrong = spmd.kernel("b/dp d -> b/dp d", mesh=mesh, check="off")(lambda x: x * x.shape[0])
    with pytest.raises(AssertionError):
        check_pasted(wrong, [np.ones((8, 4), np.float32)])


def test_every_fix_is_run_somewhere():
    strings = [fix for fix in FIXES if fix.startswith('"')]  # behind a call that is another fix of the same message
    assert len(CALLS) >= 20 and {*FIXES} == {*CALLS, *ASKED, *strings, "devices=devices[:2]"}
