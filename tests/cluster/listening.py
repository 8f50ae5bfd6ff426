"""A program that says on which addresses of this machine its coordinator listens, as Linux knows it."""

import os
from pathlib import Path

import jax

import spmd

LISTENS = "0A"


def addresses(port: int) -> list[str]:
    """The addresses, in hexadecimal digits."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return sorted(row[1].split(":")[0] for row in rows if row[3] == LISTENS and row[1].endswith(f":{port:04X}"))


if __name__ == "__main__":
    spmd.cluster.initialize()
    if jax.process_index() == 0:
        where = os.environ.get("SPMD_COORDINATOR") or f"localhost:{os.environ['MASTER_PORT']}"
        print("listens", *addresses(int(where.rsplit(":", 1)[1])), flush=True)
