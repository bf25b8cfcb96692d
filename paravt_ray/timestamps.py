"""Seconds from the notations in which people and models write times: `12.5`, `12.5 s`, `mm:ss`, `hh:mm:ss.f`."""

from __future__ import annotations

import math
import re

_NUMBER = r"\d+(?:\.\d+)?|\.\d+"
_CLOCK = r"(?:\d+:[0-5]?\d|\d+):[0-5]?\d(?:\.\d+)?"
_UNIT = r"(?:s|secs?|seconds?)\b"

TIME_PATTERN = rf"(?:{_CLOCK}|{_NUMBER})(?:\s*{_UNIT})?"
"""Regular expression of one unsigned time inside a longer text; compile with re.ASCII."""

_TIME = re.compile(rf"(?P<sign>[+-]?)(?:(?P<clock>{_CLOCK})|(?P<number>(?:{_NUMBER}|\d+\.)(?:e[+-]?\d+)?))", re.ASCII)
_LONGEST = 40
_UNIT_SUFFIX = re.compile(rf"\s*{_UNIT}$", re.ASCII)


def to_seconds(value: object) -> float:
    """Seconds of a number or of a text in one of the notations; negative times are kept.

    Raises:
        ValueError: for anything else, in particular booleans, NaN and infinity. The message has no subject yet.
    """
    if isinstance(value, str):
        seconds = _parse(value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            seconds = math.inf
    else:
        raise ValueError("must be a time in seconds")
    if not math.isfinite(seconds):
        raise ValueError("must be a finite number of seconds")
    return seconds


def _parse(text: str) -> float:
    if len(text) > _LONGEST:
        raise ValueError(f"must be seconds, mm:ss or hh:mm:ss, not a text of {len(text)} characters")
    bare = _UNIT_SUFFIX.sub("", text.strip().lower())
    match = _TIME.fullmatch(bare)
    if match is None:
        raise ValueError(f"must be seconds, mm:ss or hh:mm:ss, not {text!r}")
    if match["number"]:
        seconds = float(match["number"])
    else:
        seconds = 0.0
        for part in match["clock"].split(":"):
            seconds = seconds * 60.0 + float(part)
    return -seconds if match["sign"] == "-" else seconds
