"""Pipelines, schedules and overlapped products that are given what does not fit."""

import numpy as np

import spmd
from spmd import parallel
from tests.errors.registry import X, bad, body, fixed

W = np.ones((4, 4), np.float32)  # one row for each of the stages on tp


STAGES = "p/tp d, m d -> m d"


def run(mesh, stage=lambda w, x: x * w, pattern=STAGES, args=(W, X), **options):
    return body(pattern, lambda w, x: parallel.pipeline(stage, w, x, pp="tp", **options), mesh, *args)


bad(
    pipeline_of_whole_parameters=lambda mesh: run(mesh, pattern="p d, m d -> m d"),
)


@fixed
def pipeline_of_whole_parameters_fixed(mesh, fix):
    fn = lambda w, x: parallel.pipeline(lambda w, x: x * w, fix(w=w), x, pp="tp")
    np.testing.assert_array_equal(body("p d, m d -> m d", fn, mesh, 2 * W, X), 16 * X)


bad(
    pipeline_of_one_stage_everywhere=lambda mesh: body(
        "p d, m d -> m d", lambda w, x: parallel.pipeline(lambda w, x: x * w, w[:1] * 2.0, x, pp="tp"), mesh, W, X
    ),
    pipeline_without_rounds=lambda mesh: run(mesh, repeats=2),
    pipeline_of_the_wrong_rounds=lambda mesh: run(
        mesh, pattern="v p/tp d, m d -> m d", args=(np.ones((3, 4, 4), np.float32), X), repeats=2
    ),
    pipeline_of_nothing=lambda mesh: body(
        "m d -> m d", lambda x: parallel.pipeline(lambda w, x: x, {}, {"x": x, "y": np.float32(1)}, pp="tp"), mesh
    ),
    pipeline_stage_that_changes_its_shape=lambda mesh: run(mesh, lambda w, x: x[:2]),
)


@bad
def pipeline_stage_that_varies(mesh):
    def stage(w, x):
        return x * spmd.all_gather(w, "d/dp -> d")

    run(mesh, stage, "p/tp d/dp, m d -> m d")


@fixed
def pipeline_stage_that_varies_fixed(mesh, fix):
    def stage(w, x):
        return x * spmd.all_gather(w, "d/dp -> d")

    def whole(w, x):
        return spmd.reduce(parallel.pipeline(stage, w, fix(x=x), pp="tp"), "m d -> scalar", "mean")

    assert np.allclose(body("p/tp d/dp, m d -> scalar", whole, mesh, W, X), X.mean())


bad(
    pipeline_that_saves_something_else=(
        lambda mesh: run(mesh, save="nothing"),
        lambda mesh, fix: np.testing.assert_array_equal(run(mesh, args=(2 * W, X), **fix()), 16 * X),
    ),
    pipeline_with_a_result_elsewhere=(
        lambda mesh: run(mesh, result="scattered"),
        lambda mesh, fix: np.testing.assert_array_equal(run(mesh, args=(2 * W, X), **fix()), 16 * X),
    ),
    pipeline_of_no_rounds=lambda mesh: run(mesh, repeats=0),
)


@bad
def schedule_of_nothing(mesh):
    parallel.pipeline_schedule(4, 0, 1.5)  # type: ignore[arg-type]


bad(
    schedule_of_an_unknown_order=lambda mesh: parallel.pipeline_schedule(4, 8, order="zero-bubble"),
)


@fixed
def schedule_of_an_unknown_order_fixed(mesh, fix):
    assert parallel.pipeline_schedule(4, 8, **fix()) == parallel.pipeline_schedule(4, 8)


bad(
    schedule_of_rounds_without_groups=lambda mesh: parallel.pipeline_schedule(4, 6, 2, "1f1b"),
)


def total(mesh, loss=lambda head, y, target: y.sum(), pattern="p/tp d, m d -> scalar", targets=None, **options):
    stage = lambda w, x: x * w
    fn = lambda w, x: parallel.pipeline_loss(stage, loss, w, None, x, targets, pp="tp", **options)
    return body(pattern, fn, mesh, W, X)


bad(
    schedule_of_rounds_with_weights_apart=lambda mesh: parallel.pipeline_schedule(4, 8, 2, "zb-h1"),
    pipeline_loss_in_an_order_of_pipeline=lambda mesh: total(mesh, order="forward"),
)


@fixed
def pipeline_loss_in_an_order_of_pipeline_fixed(mesh, fix):
    assert total(mesh, **fix()) == total(mesh)


bad(
    pipeline_loss_of_several_numbers=lambda mesh: total(mesh, lambda head, y, target: y),
    pipeline_loss_that_is_no_partial_sum=lambda mesh: total(mesh, data="dp"),
    pipeline_loss_that_is_a_partial_sum=lambda mesh: total(mesh, pattern="p/tp d/dp, m d/dp -> scalar"),
    pipeline_loss_of_other_targets=lambda mesh: total(mesh, targets=np.ones(3, np.float32)),
    pipeline_loss_of_no_rounds=lambda mesh: total(mesh, repeats=0),
    overlap_of_a_vector=lambda mesh: body(
        "s/tp d, d -> s/tp d", lambda x, w: parallel.gather_einsum(x, w, tp="tp"), mesh, X, X[0]
    ),
)


@bad
def overlap_of_a_sequence_elsewhere(mesh):
    def up(x, w):
        return spmd.nn.column_linear(x, w, tp="tp", sp="dp", overlap=True)

    body("s/dp d, d f/tp -> s f/tp", up, mesh, X, np.ones((4, 8), np.float32))
