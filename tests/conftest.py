"""What every test stands on: eight CPU devices, strict JAX, and a case count from the environment."""

import gc
import os
import platform
import zlib
from collections.abc import Callable, Iterator
from importlib import metadata

import jax
import pytest

import spmd

# Before any backend is used, hence at import. Not through XLA_FLAGS, which would depend on import order.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# LLVM's passes were a third of the suite's time. They work on what HLO has become: the same HLO comes out.
jax.config.update("jax_disable_most_optimizations", True)
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # in scripts and pages too

# Flags of XLA, and the first jax that may not know them: an unknown flag ends the process. The older emitter of loops
# compiles small programs five times as fast. Threads that share the code of one small program cost more than they save.
# Without FMA numbers do not depend on what is fused, so that they are equal in the last bit.
FLAGS = {"xla_cpu_use_fusion_emitters=false": (0, 11), "xla_cpu_parallel_codegen_split_count=1": (0, 13)}
if platform.machine() == "x86_64":
    FLAGS["xla_cpu_max_isa=AVX"] = (0, 13)
given = os.environ.get("XLA_FLAGS", "")
known = [f"--{flag}" for flag, end in FLAGS.items() if jax.__version_info__ < end and flag.split("=")[0] not in given]
os.environ["XLA_FLAGS"] = " ".join([given, *known]).strip()

# A first call that asks numbers of every small kernel would double the suite's time, and many tests have wrong kernels.
# tests/kernels/test_trial.py is about these numbers; scripts and pages run with the default, as users do.
os.environ.setdefault("SPMD_CHECK", "types")

os.environ["COLUMNS"] = "100"  # tables are as wide as the terminal

gc.set_threshold(50_000, 20, 50)  # traces make many small objects that stay

FULL_CASES = 6  # above it, the exhaustive tests run too


def case_count(full: int = FULL_CASES) -> int:
    """How many random cases a sampled test runs: SPMD_TEST_CASES, else a sixth of `full`, rounded up."""
    count = int(os.environ.get("SPMD_TEST_CASES", -(-full // 6)))
    if count < 1:
        raise ValueError(f"SPMD_TEST_CASES must be at least 1, got {count}.")
    return count


# What fails before a version of JAX, by JAX's own doing. A test that passes there fails as one of these.
FAILS_BEFORE = {
    "tests/checker/test_simulator.py::test_bodies_in_bodies": (
        (0, 10, 2),
        "axis_index of an outer body is not lowered in an inner one",
    ),
    "tests/haliax/test_jit.py::test_gradients_and_jit_around_it": ((0, 10, 1), "reshard takes no array of one device"),
    "tests/haliax/test_jit.py::test_fsdp_gathers_weights_and_the_gradient_goes_through_it": (
        (0, 10, 1),
        "reshard takes no array of one device",
    ),
    "tests/kernels/test_inside.py::test_gradients_over_some_axes_are_beyond_jax": (
        (0, 10, 2),
        "JAX words its error otherwise",
    ),
    "tests/kernels/test_meshes.py::test_the_mesh_of_a_with_block": ((0, 10, 1), "a mesh in a with block does not warn"),
    "tests/kernels/test_meshes.py::test_checkify[explicit-True]": ((0, 10, 1), "checkify loses the manual axes"),
    "tests/kernels/test_meshes.py::test_checkify[auto-True]": ((0, 10, 1), "checkify loses the manual axes"),
    "tests/test_placement.py::test_partial_sums_between_kernels[True]": ((0, 10, 1), "partial sums have no devices"),
    "tests/test_unit_axes.py::test_an_axis_of_size_1_costs_nothing[max]": ((0, 10, 1), "the compiler broadcasts more"),
    "tests/propagation/test_types_on_the_way.py::test_each_is_planned_listed_and_priced[a_gradient_through_a_branch]": (
        (0, 10, 2),
        "a gradient of auto_axes in a branch has two meshes",
    ),
    "tests/test_examples_run.py::test_pages[docs/pages/budgets.md]": ((0, 10, 2), "the compiler moves otherwise"),
    "tests/test_examples_run.py::test_pages[docs/pages/explain.md]": ((0, 10, 2), "the compiler moves otherwise"),
}


def in_slice(name: str, seed: int, parts: int) -> bool:
    """Whether a test is in the slice of a seed, one of `parts`: together the slices are all tests."""
    return zlib.crc32(name.encode()) % parts == seed % parts


def default_parts(named: bool) -> int:
    """Of how many slices a run takes one: of three, unless the caller names tests, or asks for all."""
    return 1 if named or case_count() > FULL_CASES else 3


def pytest_configure(config: pytest.Config) -> None:
    """Settle it for the workers of xdist, which are given names."""
    named = config.args_source is pytest.Config.ArgsSource.ARGS or bool(config.option.keyword)
    os.environ.setdefault("SPMD_TEST_SLICE", f"{default_parts(named)}")


def pytest_report_header() -> str:
    return f"one of {os.environ['SPMD_TEST_SLICE']} slices of the tests, by SPMD_TEST_SLICE and SPMD_TEST_SEED"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """SPMD_TEST_SLICE=8 runs an eighth of the tests: that of the seed."""
    parts, seed = int(os.environ["SPMD_TEST_SLICE"]), int(os.environ.get("SPMD_TEST_SEED", 0))
    kept = {item: in_slice(item.nodeid, seed, parts) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not kept[item]])
    items[:] = [item for item in items if kept[item]]
    for item in items:
        version, reason = FAILS_BEFORE.get(item.nodeid, ((), ""))
        if jax.__version_info__ < version:
            item.add_marker(pytest.mark.xfail(reason=f"JAX {jax.__version__}: {reason}", strict=True))


@pytest.fixture(autouse=True, scope="module")
def forget() -> Iterator[None]:
    """Programs compiled for one file are of no use to the next: half the memory, and less to look through for garbage."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def cases() -> int:
    """The number of random cases per sampled test (SPMD_TEST_CASES, small by default)."""
    return case_count()


@pytest.fixture(scope="session")
def mesh() -> jax.sharding.Mesh:
    """The mesh of a test that asks for nothing special."""
    return spmd.make_mesh(dp=2, tp=4)


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    """The eight CPU devices."""
    found = jax.devices()
    assert len(found) == 8, f"a backend was used before conftest asked for 8 CPU devices: {found}"
    return found


def main(words: list[str]) -> int:
    """The command `spmd`, in this process."""
    [command] = metadata.entry_points(group="console_scripts", name="spmd")
    return command.load()(words)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line: its status, what it printed, what it complained of."""

    def run(*words: str) -> tuple[int, str, str]:
        status = main([*words])
        out = capsys.readouterr()
        return status, out.out, out.err

    return run
