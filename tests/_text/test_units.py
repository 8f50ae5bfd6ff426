"""Quantities for people: each unit, and the places where one unit follows the other."""

import pytest

from spmd._text.units import bytes_text, seconds_text, si_text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (5 * 2**30, "5 GiB"), (2**52, "4096 TiB")],
)
def test_bytes(count, text):
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (1e-10, "0.1 ns"), (9.994e-7, "999 ns"), (9.996e-7, "1 µs"), (0.9996, "1 s"), (12_345, "12,345 s")],
)
def test_seconds(seconds, text):
    assert seconds_text(seconds) == text


def test_decimal_prefixes():
    assert [si_text(10.0**power, "B") for power in (0, 3, 6, 9, 12, 15, 18, 21)] == [
        *("1 B", "1 kB", "1 MB", "1 GB", "1 TB", "1 PB", "1 EB"),
        "1e+03 EB",
    ]
