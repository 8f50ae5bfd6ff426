"""Where programs write: folders and buckets; other URLs are errors, and never folders of that name."""

from pathlib import Path

import pytest

from spmd.cluster._fields import in_a_bucket
from spmd.errors import SpmdError


@pytest.mark.parametrize("path", ["run", "/data/run", Path("a/b"), "a:b", "C:", "./gs:x"])
def test_folders(path):
    assert not in_a_bucket(path, ("gs",), "f(path)")


def test_buckets():
    assert in_a_bucket("gs://b/run", ("gs",), "f(path)") and in_a_bucket("s3://b/u.zarr", ("gs", "s3"), "f(path)")


@pytest.mark.parametrize("path", ["s3://b/run", "ftp://h/run", "gs://", "gs:/b/run", Path("gs://b/run"), "file:///tmp"])
def test_other_places_are_refused(path):
    with pytest.raises(SpmdError, match='a folder, or "gs://bucket/folder", as a string'):
        in_a_bucket(path, ("gs",), "f(path)")
