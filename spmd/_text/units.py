"""Quantities for people, and the bytes that a collective sends."""

from __future__ import annotations

from fractions import Fraction


def bytes_text(count: int) -> str:
    """A number of bytes.

    >>> bytes_text(512), bytes_text(1536), bytes_text(3 * 2**20)
    ('512 B', '1.5 KiB', '3 MiB')
    """
    if count < 1024:
        return f"{count} B"
    amount = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        amount /= 1024
        if amount < 1024 or unit == "TiB":
            return f"{amount:.4g} {unit}"
    raise AssertionError("unreachable: the last unit returns")


def seconds_text(seconds: float) -> str:
    """A duration for people.

    >>> [seconds_text(s) for s in (0, 3.2e-7, 0.00123, 0.5, 75.0)]
    ['0 s', '320 ns', '1.23 ms', '500 ms', '75 s']
    """
    if seconds == 0:
        return "0 s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")):
        if seconds >= 0.9995 * scale or unit == "ns":
            amount = seconds / scale
            return f"{amount:,.0f} {unit}" if amount >= 1000 else f"{amount:.3g} {unit}"
    raise AssertionError("unreachable: the last unit returns")


def si_text(amount: float, unit: str) -> str:
    """An amount with a decimal prefix.

    >>> si_text(9.894e14, "FLOP/s"), si_text(80e9, "B"), si_text(12, "B")
    ('989 TFLOP/s', '80 GB', '12 B')
    """
    for scale, letter in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if amount >= scale:
            return f"{amount / scale:.3g} {letter}{unit}"
    return f"{amount:.3g} {unit}"


def sent_bytes(kind: str, operand: int, devices: int) -> int:
    """Bytes that a device sends in one collective whose operands on it have `operand` bytes.

    The larger side of an all_gather is its result, `devices` times the operand.

    >>> [sent_bytes(kind, 64, 4) for kind in ("all_gather", "psum_scatter", "psum", "all_to_all", "ppermute")]
    [192, 48, 96, 48, 64]
    """
    share = Fraction(devices - 1, devices)
    exact = {
        "all_gather": operand * devices * share,
        "psum": 2 * operand * share,
        "ppermute": Fraction(operand),
        "pbroadcast": Fraction(operand),
    }.get(kind, operand * share)
    return round(exact)
