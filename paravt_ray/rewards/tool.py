"""R_tool: whether tools were really used and helped (ParaVT, arXiv 2605.20342, section 4)."""

from __future__ import annotations

from paravt_ray.episode import CallStatus, Episode


def score_tool(episode: Episode, accuracy: float) -> float:
    """0 without a valid call, 0.1 if there was one but none was served, 0.3 if one was; then +0.5 if also R_acc > 0.

    Read from the execution records, never from text, and per trajectory, never per call: further calls, duplicates
    and failed ones add nothing. A call is valid if it could have been run on the episode's video. At most 0.8.
    """
    records = episode.call_records
    if any(record.status is CallStatus.SERVED for record in records):
        return 0.8 if accuracy > 0.0 else 0.3
    return 0.1 if any(record.status is not CallStatus.INVALID for record in records) else 0.0
