"""The page "Haliax beside spmd": every row of its table has a test, and every name of the Haliax document is there."""

import re
from pathlib import Path

from spmd import haliax as hax
from tests.haliax import test_jit, test_placement, test_queries

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "pages" / "haliax.md").read_text()

# Each row by its first name, with tests of what it says.
ROWS = {
    "Axis": [test_placement.test_names_of_a_tree, test_placement.test_equinox_modules],
    "Mesh": [test_queries.test_queries],
    "zeros": [test_placement.test_zeros_are_created_in_their_place],
    "device_put": [test_placement.test_shard_takes_the_mesh_of_the_array_and_keeps_gradients],
    "with_sharding_constraint": [test_placement.test_shard_inside_and_outside_jit],
    "ResourceMapping": [test_placement.test_mappings_nest_and_merge],
    "PhysicalAxisSpec": [test_queries.test_queries],
    "axis_mapping": [
        test_placement.test_mappings_nest_and_merge,
        test_placement.test_a_mapping_stays_in_its_thread,
        test_placement.test_a_compiled_function_follows_the_mapping,
    ],
    "shard": [
        test_placement.test_shard_inside_and_outside_jit,
        test_queries.test_a_missing_mesh_is_an_error,
        test_placement.test_a_big_array_that_stays_whole_is_reported,
    ],
    "auto_sharded": [test_placement.test_auto_sharded_does_nothing_without_a_mapping],
    "shard_with_axis_mapping": [test_placement.test_shard_with_axis_mapping],
    "named_jit": [
        test_jit.test_as_a_function_and_as_a_decorator,
        test_jit.test_arguments_keep_their_own_shardings_where_nothing_names_them,
        test_jit.test_which_mapping_places_arguments_and_results,
        test_jit.test_donated_arguments_are_deleted,
        test_jit.test_donated_keywords_are_deleted,
    ],
    "WrappedCallable": [test_jit.test_lower_compiles_what_a_call_runs],
    "fsdp": [test_jit.test_fsdp_in_each_of_its_forms],
    "round_axis_for_partitioning": [test_queries.test_queries, test_queries.test_what_was_rounded_divides],
    "physical_axis_name": [test_queries.test_queries, test_placement.test_mappings_nest_and_merge],
    "physical_axis_size": [test_queries.test_queries],
    "sharding_for_axis": [test_queries.test_queries],
    "pspec_for": [test_queries.test_queries],
}
# what something else replaces
ELSEWHERE = {"Axis", "Mesh", "zeros", "device_put", "with_sharding_constraint", "PhysicalAxisSpec", "WrappedCallable"}


def rows(page: str) -> list[str]:
    """The first name of each row of the last table."""
    table = page.rsplit("|---|---|---|\n", 1)[1].split("\n\n", 1)[0]
    return re.findall(r"^\| `(\w+)", table, re.MULTILINE)


def test_every_row_has_tests():
    assert rows(PAGE) == list(ROWS)
    assert all(tests for tests in ROWS.values())


def test_every_name_of_the_document_is_here():
    assert set(hax.__all__) == set(ROWS) - ELSEWHERE | {"WholeArrayWarning"}


def test_a_row_without_a_test_is_noticed():
    """Meta-test."""
    assert rows(PAGE.replace("| `pspec_for`", "| `other` | | |\n| `pspec_for`")) != list(ROWS)
