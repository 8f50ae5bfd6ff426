"""Two processes, of which one has four devices and the other two: `tests/cluster/unequal.py FOLDER`."""

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

import spmd

X = np.arange(48, dtype=np.float32).reshape(12, 4)


def close(found: Any, wanted: Any) -> None:
    for shard in found.addressable_shards:
        np.testing.assert_allclose(shard.data, np.asarray(wanted)[shard.index], rtol=1e-6)


def main(folder: Path) -> None:
    spmd.cluster.initialize()
    assert [len([one for one in jax.devices() if one.process_index == rank]) for rank in range(2)] == [4, 2]
    mesh = spmd.make_mesh(a=-1)
    x = spmd.from_process_local(X[spmd.cluster.my_rows("r/a c", X.shape, mesh=mesh)], "r/a c", shape=X.shape, mesh=mesh)
    close(x, X)
    total = spmd.kernel("r/a c -> c", mesh=mesh)(lambda x: spmd.reduce(x, "r/a c -> c", "sum"))
    spmd.cluster.same_program(total.lower(x))
    close(total(x), X.sum(0))
    close(spmd.shard(X, "r c", mesh=mesh), X)
    data = spmd.cluster.batches(X, "b/a c", batch=6, shuffle=False, mesh=mesh)
    close(next(data), X[:6])
    spmd.cluster.write_zarr(folder / "u", x, "r c")
    close(spmd.cluster.read_zarr(folder / "u", mesh=mesh), X)
    make = spmd.init(lambda key: {"w": jax.random.normal(key, (12, 4)), "n": jax.numpy.int32(3)}, "...", mesh=mesh)
    with spmd.cluster.checkpoints(folder / "run") as saved:
        state = make(jax.random.key(1))
        saved.save(1, {"w": x, "n": state["n"]}, data=data)
        found, step = saved.restore(make, jax.random.key(0), data=data)
    assert step == 1 and not spmd.cluster.stopping(step)
    close(found["w"], X)
    close(next(data), X[6:])
    print("done", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
