"""A cache of decoded frames, bounded in bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from tool_workers.planning import Target
from tool_workers.records import Limits
from tool_workers.shot import Shot

_OVERHEAD = 512
"""Bytes of an entry beside its pixels."""


class FileId(NamedTuple):
    """A file as it was when it was read: another one under the same name is another file."""

    path: str
    modified_ns: int
    size: int


class ShotKey(NamedTuple):
    """What a shot depends on."""

    file: FileId
    target: Target
    limits: Limits


class ShotCache:
    """Keeps the most recently used shots."""

    def __init__(self, capacity: int) -> None:
        """`capacity` in bytes."""
        self._capacity = capacity
        self._shots: OrderedDict[ShotKey, Shot] = OrderedDict()
        self.bytes = 0

    def get(self, key: ShotKey) -> Shot | None:
        """Return the shot, now the most recently used, or None."""
        shot = self._shots.get(key)
        if shot is not None:
            self._shots.move_to_end(key)
        return shot

    def put(self, key: ShotKey, shot: Shot) -> None:
        """Keep the shot and drop the least recently used ones beyond the capacity."""
        if (old := self._shots.pop(key, None)) is not None:
            self.bytes -= _size(old)
        self._shots[key] = shot
        self.bytes += _size(shot)
        while self.bytes > self._capacity and self._shots:
            _, dropped = self._shots.popitem(last=False)
            self.bytes -= _size(dropped)

    def __len__(self) -> int:
        return len(self._shots)


def _size(shot: Shot) -> int:
    return _OVERHEAD + (shot.pixels.nbytes if shot.pixels is not None else 0)
