"""A dictionary that keeps only the entries that were used last."""

from __future__ import annotations

from typing import Any


class Recent(dict[Any, Any]):
    """A dict that forgets. Its keys may hold what a user made static, which nothing else would ever release.

    Args:
      size: How many entries are kept.
    """

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        while len(self) > self.size:
            self.pop(next(iter(self), None), None)

    def used(self, key: Any) -> Any:
        """The entry, or None. From now on it is the last to be forgotten."""
        value = self.get(key)
        if value is not None:
            super().pop(key, None)
            super().__setitem__(key, value)
        return value
