"""Reads frames of one file by presentation time, exactly, or says why it cannot. Runs only inside a decoder process.

A frame is returned only if the decoder delivered it, with the presentation time that the container states, and nothing
that it was predicted from was damaged.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from tool_workers.counted import counted_shots
from tool_workers.decoding import Decoder, DisorderError
from tool_workers.planning import Target
from tool_workers.probing import probe
from tool_workers.records import Limits, VideoInfo
from tool_workers.shot import Shot
from tool_workers.sizes import fit_size
from tool_workers.source import Entry, Source

_GAP_S = 10.0
"""Targets closer than this are read in one go; across a wider gap, seeking is cheaper."""
_HELD_BYTES = 256 << 20
"""Compressed data held in memory for one go."""
_BACK_OFF_S = (0.0, 1.0, 10.0, 60.0)
"""How far before a target to seek when what an earlier seek found begins too late; then from the file's start."""


@dataclass
class _Stretch:
    """Consecutive packets, from a keyframe or the file's beginning on."""

    entries: list[Entry]
    covered: int
    """How many of the targets they suffice for."""
    problem: str = ""
    """Why reading ended before the last target was covered."""


class Reader:
    """One open video file."""

    def __init__(self, path: str) -> None:
        """Open the file and find out what it holds.

        Raises:
            ToolError: not_found, unreadable, no_video, empty or damaged.
        """
        self._source = Source(path)
        try:
            self._decoder = Decoder(self._source)
            self.info, self._counted = probe(self._source, self._decoder)
        except BaseException:
            self._source.close()
            raise

    @property
    def bytes_read(self) -> int:
        """Compressed bytes read so far."""
        return self._source.bytes_read

    @property
    def frames_decoded(self) -> int:
        """Frames that the decoder has delivered so far."""
        return self._decoder.frames_decoded

    def close(self) -> None:
        """Close the file."""
        self._source.close()

    def shots(
        self, targets: Sequence[Target], limits: Limits, optional: AbstractSet[Target] = frozenset()
    ) -> list[Shot | None]:
        """Return a shot for each target, in their order; targets rise. Equal frames share one array.

        Optional targets that lie before the keyframe from which the others are decoded are left out: None.
        """
        size = fit_size(self.info.width, self.info.height, limits)
        if not self._counted:
            try:
                shots = self._timed_shots(targets, optional, size)
                return [shots.get(target) for target in targets]
            except DisorderError:
                self._counted = True
        return list(counted_shots(self._source, self._decoder, self.info, targets, size))

    def examined(self) -> VideoInfo:
        """Read the whole file, without decoding it, and return what it is with all that is wrong with its data."""
        self._source.reopen()
        problems = Counter(entry.problem for entry in self._source.entries() if entry.problem)
        found = [f"{count} frames: {problem}" for problem, count in problems.most_common()]
        return replace(
            self.info, damage="; ".join([*filter(None, [self.info.damage]), *found, *self._source.problems[:1]])
        )

    def _timed_shots(
        self, targets: Sequence[Target], optional: AbstractSet[Target], size: tuple[int, int]
    ) -> dict[Target, Shot]:
        shots: dict[Target, Shot] = {}
        rest = targets
        while rest:
            group = self._next_group(rest)
            first = next((target for target in group if target not in optional), group[0])
            stretch = self._gather(group, first, keyframes=1)
            covered, uncovered, rest = group[: stretch.covered], group[stretch.covered :], rest[stretch.covered :]
            start = stretch.entries[0].pts if stretch.entries else 0
            kept = [t for t in covered if t not in optional or self._source.floor(t.time) >= start]
            shots |= zip(kept, self._read(stretch, kept, first, size), strict=True)
            if stretch.problem:
                shots |= {target: Shot(target.time, None, stretch.problem) for target in uncovered}
                rest = rest[len(uncovered) :]
        return shots

    def _read(self, stretch: _Stretch, targets: Sequence[Target], first: Target, size: tuple[int, int]) -> list[Shot]:
        entries = stretch.entries
        chosen = self._choose(_displayed(entries), targets)
        found, _ = self._decoder.shots(entries, _known(chosen), size, skip=True)
        if any(pts is None or pts not in found or found[pts].problem for pts in chosen):
            # Perhaps the decoder needs a longer run-up than from one keyframe: start at an earlier one, skip nothing.
            entries = self._gather(targets, first, keyframes=2).entries
            chosen = self._choose(_displayed(entries), targets)
            found, delivered = self._decoder.shots(entries, _known(chosen), size, skip=False)
            if not _known(chosen) <= found.keys():
                # Some packets bring no frame of their own: choose among the frames that are really delivered.
                frames = [frame for frame in _displayed(entries) if frame[0] in delivered or frame[0] in found]
                chosen = self._choose(frames, targets)
                found |= self._decoder.shots(entries, _known(chosen) - found.keys(), size, skip=False)[0]
        suspect = any(entry.problem for entry in entries)
        return [
            (suspect and self._lost(entries, pts, target)) or found[pts]
            if pts is not None and pts in found
            else Shot(target.time, None, f"there is no frame at {target.time:.3f} s")
            for pts, target in zip(chosen, targets, strict=True)
        ]

    def _lost(self, entries: Sequence[Entry], pts: int, target: Target) -> Shot | None:
        """Return a problem if the frame is only chosen because data of the time after it is missing."""
        following = min((e for e in entries if e.pts > pts), key=lambda e: e.pts, default=None)
        entry = next(e for e in entries if e.pts == pts)
        end = pts + round(1.5 * (entry.packet.duration or 0))
        if following is None or not following.problem or self._source.ticks(target.time) <= end:
            return None
        return Shot(target.time, None, f"the frame at {target.time:.3f} s is missing ({following.problem})")

    def _next_group(self, targets: Sequence[Target]) -> Sequence[Target]:
        """Return the first targets, up to a gap that it is cheaper to seek across than to decode."""
        for i in range(1, len(targets)):
            last, lowest = targets[i - 1].time, self._lowest(targets[i])
            if self._source.seconds(lowest) - last <= _GAP_S:
                continue
            self._source.seek(lowest)
            landing = next(self._source.entries(), None)
            if landing is None or self._source.seconds(landing.pts) > last:
                return targets[:i]
        return targets

    def _gather(self, targets: Sequence[Target], first: Target, keyframes: int) -> _Stretch:
        """Read the packets that decide and deliver the frames of the targets, from `keyframes` before `first` on."""
        lowest = self._lowest(first)
        first_tick = self._source.ticks(self.info.start_time)
        for seconds in _BACK_OFF_S:
            goal = lowest - self._source.ticks(seconds)
            if goal < first_tick:
                break
            self._source.seek(goal)
            stretch = self._stretch(targets, lowest, keyframes)
            if sum(e.key and e.pts <= lowest for e in stretch.entries) >= keyframes:
                return stretch
        self._source.seek(first_tick)
        stretch = self._stretch(targets, lowest, keyframes)
        if stretch.entries and stretch.entries[0].pts <= first_tick:
            return stretch
        self._source.reopen()
        return self._stretch(targets, lowest, keyframes)

    def _stretch(self, targets: Sequence[Target], lowest: int, keyframes: int) -> _Stretch:
        needed = [self._source.ceil(t.time + t.after) for t in targets]
        entries: list[Entry] = []
        starts: list[int] = []
        held = covered = 0
        for entry in self._source.entries():
            if entry.key and entry.pts <= lowest:
                starts.append(len(entries))
                if len(starts) > keyframes:  # what lies before is not needed
                    dropped = starts[-keyframes]
                    held -= sum(e.packet.size for e in entries[:dropped])
                    entries = entries[dropped:]
                    starts = [start - dropped for start in starts[-keyframes:]]
            entries.append(entry)
            held += entry.packet.size
            reached = entry.packet.dts if entry.packet.dts is not None else entry.pts
            while covered < len(needed) and reached > needed[covered]:
                covered += 1
            if covered == len(needed) or (held > _HELD_BYTES and covered):
                return _Stretch(entries, covered)
        return self._last_stretch(entries, targets)

    def _last_stretch(self, entries: list[Entry], targets: Sequence[Target]) -> _Stretch:
        """The file has ended: targets up to the end of its last frame are covered."""
        problems = self._source.problems or ["there is no more data in the file"]
        if not entries:
            return _Stretch([], 0, f"no frames from {targets[0].time:.3f} s on: {problems[-1]}")
        last = max(entries, key=lambda entry: entry.pts)
        end = last.pts + (last.packet.duration or 0)
        if not self.info.damage and not self._source.problems:
            end = max(end, self._source.ticks(self.info.end_time))
        covered = sum(self._source.floor(target.time) <= end for target in targets)
        return _Stretch(entries, covered, f"no frames after {self._source.seconds(end):.3f} s: {problems[-1]}")

    def _lowest(self, target: Target) -> int:
        return self._source.floor(target.time - target.before)

    def _choose(self, frames: Sequence[tuple[int, bool]], targets: Sequence[Target]) -> list[int | None]:
        """Return the pts of the frame that stands for each target (see `Target`), None where there is none."""
        return [self._choose_one(frames, target) for target in targets]

    def _choose_one(self, frames: Sequence[tuple[int, bool]], target: Target) -> int | None:
        begins = bisect_left(frames, (self._source.ceil(target.time), False))
        if begins < len(frames) and frames[begins][0] < self._source.ceil(target.time + target.after):
            return frames[begins][0]
        shown = bisect_right(frames, (self._source.floor(target.time), True)) - 1
        if target.before:
            earliest = self._source.ceil(target.time - target.before)
            for pts, key in reversed(frames[: shown + 1]):
                if pts < earliest:
                    break
                if key:
                    return pts
        if shown < 0:
            first_tick = self._source.ticks(self.info.start_time)
            return frames[0][0] if frames and frames[0][0] <= first_tick else None
        return frames[shown][0]


def _displayed(entries: Sequence[Entry]) -> list[tuple[int, bool]]:
    """Return (pts, whether a keyframe) of the packets that are for display, in order of display."""
    return sorted((entry.pts, entry.key) for entry in entries if not entry.packet.is_discard)


def _known(chosen: Sequence[int | None]) -> set[int]:
    return {pts for pts in chosen if pts is not None}
