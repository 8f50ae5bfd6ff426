"""A dict that forgets what was used longest ago."""

from spmd._python.recent import Recent


def test_the_oldest_entry_goes_first():
    recent = Recent(2)
    for key in "abc":
        recent[key] = key.upper()
    assert list(recent) == ["b", "c"]


def test_a_used_entry_stays_longer():
    recent = Recent(2)
    recent["a"], recent["b"] = 1, 2
    assert recent.used("a") == 1 and recent.used("z") is None
    recent["c"] = 3
    assert list(recent) == ["a", "c"]


def test_a_plain_look_changes_nothing():
    recent = Recent(2)
    recent["a"], recent["b"] = 1, 2
    assert recent["a"] == 1
    recent["c"] = 3
    assert list(recent) == ["b", "c"]
