"""What is written to memory where it is put there."""

from spmd.inspect._values import Buffer, Value, ending_bytes


def test_buffers_are_read_once_and_each_result_is_written():
    buffer = Buffer(96.0)
    chain = Value(buffers=frozenset({buffer}), chain=True)
    assert ending_bytes([(chain, 96.0), (chain, 48.0)]) == 96 + 48 + 96
    assert ending_bytes([(Value(buffers=frozenset({buffer})), 96.0)]) == 0


def test_an_open_buffer_takes_the_result_in():
    product = Buffer(96.0, open=True)
    assert ending_bytes([(Value(buffers=frozenset({product}), chain=True), 96.0)]) == 0


def test_a_result_goes_into_the_smallest_buffer_that_has_room():
    """Whatever the order of a set, which goes by addresses."""
    found = set()
    for _ in range(50):
        buffers = frozenset(Buffer(nbytes, open=True) for nbytes in (64.0, 96.0, 200.0))
        found.add(ending_bytes([(Value(buffers=buffers, chain=True), 96.0)]))
    assert found == {64.0 + 200.0}
