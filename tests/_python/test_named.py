"""Kernels are pickled and copied as functions are: by the name that a module has them under."""

import copy
import functools
import pickle

import pytest

from spmd._python.named import ByName


class Doubled(ByName):
    def __init__(self, fn):
        functools.update_wrapper(self, fn)


@Doubled
def at_the_top(x):
    return 2 * x


def hidden(x):
    return x


under_another_name = Doubled(hidden)


def test_what_a_module_has_comes_back_as_the_same_object():
    for one in (at_the_top, under_another_name):
        assert pickle.loads(pickle.dumps(one)) is one


def test_a_copy_is_the_same_object():
    assert copy.copy(at_the_top) is at_the_top and copy.deepcopy([at_the_top]) == [at_the_top]


def test_what_no_module_has_is_not_pickled():
    @Doubled
    def inside(x):
        return x

    with pytest.raises(pickle.PicklingError, match="inside of tests._python.test_named, made inside a function"):
        pickle.dumps(inside)
