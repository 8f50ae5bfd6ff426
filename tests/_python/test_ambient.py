"""Values that hold inside `with` blocks, whatever the order in which the blocks end."""

import contextvars
import threading

import pytest

from spmd._python.ambient import Ambient
from spmd.errors import ModeError


def test_blocks_nest_and_give_back_what_was_there():
    ambient = Ambient("test_nested", 0)
    with ambient(1):
        with ambient(2):
            assert ambient.value == 2
        assert ambient.value == 1
    assert ambient.value == 0


def suspended(ambient, value):
    with ambient(value):
        yield ambient.value


def test_a_block_that_ends_late_brings_nothing_back():
    ambient = Ambient("test_late", 0)
    first, second = suspended(ambient, 1), suspended(ambient, 2)
    assert (next(first), next(second)) == (1, 2)
    first.close()
    assert ambient.value == 2
    second.close()
    assert ambient.value == 0


def test_each_thread_has_its_own():
    ambient = Ambient("test_threads", 0)
    seen = []
    with ambient(1):
        thread = threading.Thread(target=lambda: seen.append(ambient.value))
        thread.start()
        thread.join()
        assert ambient.value == 1
    assert seen == [0]


def test_a_block_of_another_coroutine_is_an_error():
    async def waits(ambient):
        with ambient(1):
            await pause()

    class pause:
        def __await__(self):
            yield

    ambient = Ambient("test_coroutines", 0)
    task = waits(ambient)
    contextvars.copy_context().run(task.send, None)
    with pytest.raises(ModeError, match=r"another coroutine is suspended inside `with spmd.test_coroutines\(...\)`"):
        _ = ambient.value
    task.close()
    assert ambient.value == 0
