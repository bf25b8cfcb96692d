"""R_acc: how right an answer is, in [0, 1] (ParaVT, arXiv 2605.20342, section 4)."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

from paravt_ray.rewards.choices import chosen_option
from paravt_ray.timestamps import TIME_PATTERN, to_seconds

_TIME = rf"(?<![\w.:]){TIME_PATTERN}(?![\w:]|\.\d)"
_TIMES = re.compile(_TIME, re.IGNORECASE)
_BETWEEN = r"\s*(?:,|;|-|–|—|~|→|->|\b(?:to|and|until|till|through)\b)\s*"
_WINDOW = re.compile(rf"({_TIME}){_BETWEEN}({_TIME})", re.IGNORECASE)
_MINUS_SIGN = re.compile(r"(?:\A|[\[(,:=])\s*-\Z")
_WORD = re.compile(r"\d+(?:[.,:]\d+)*|\w+")
_ARTICLES = frozenset(("a", "an", "the"))


def accuracy(
    answer: str | None, gold: str, question_type: str, open_ended: str = "f1", judged: float | None = None
) -> float:
    """Score an answer: `mcq` 0 or 1, `tvg` intersection over union of the windows, `oe` by its words or by a judge.

    Args:
        answer: the text inside the last `<answer>`; None or blank is wrong.
        gold: the right answer: an option letter (with or without its text), a window, or free text.
        question_type: `mcq`, `tvg` or `oe`.
        open_ended: for `oe`: `f1` over multisets of tokens, `exact` after normalisation, or `judge`.
        judged: for `judge`: what the judge gave this answer, in [0, 1].

    Raises:
        ValueError: the right answer is none of its type, so nothing can be scored against it; or there is no judgement.
    """
    if answer is None or not answer.strip():
        return 0.0
    if question_type == "mcq":
        option = chosen_option(gold)
        if option is None:
            raise ValueError(f"The right answer {gold!r} of a multiple-choice question names no option A to J.")
        return float(chosen_option(answer) == option)
    if question_type == "tvg":
        window = parse_window(gold)
        if window is None:
            raise ValueError(f"The right answer {gold!r} of a grounding question is no window in seconds.")
        return interval_iou(parse_window(answer), window)
    if question_type == "oe":
        gold_words, words = _words(gold), _words(answer)
        if not gold_words:
            raise ValueError(f"The right answer {gold!r} of an open-ended question holds no word.")
        if open_ended == "judge":
            return _judged(judged)
        return float(words == gold_words) if open_ended == "exact" else _multiset_f1(words, gold_words)
    raise ValueError(f"Unknown question type {question_type!r}; there are mcq, tvg and oe.")


def _judged(score: float | None) -> float:
    if score is None or not 0.0 <= score <= 1.0:
        raise ValueError(f"An open-ended answer needs a judge's score in [0, 1], not {score}.")
    return score


def parse_window(text: str) -> tuple[float, float] | None:
    """The last window in a text, in seconds: "[3, 9]", "24.3 - 30.4", "from 3 to 9", "00:03 - 00:09", ...

    Where no two times stand together, a text with exactly two times in all ("starts at 3 s, ends at 9 s") is read too.
    None where there is no window or it is empty or reversed.
    """
    pairs = list(_WINDOW.finditer(text))
    if pairs:
        start_text, end_text = pairs[-1].groups()
        # A dash in front of the first time is a sign only where no time stands before the dash.
        sign = "-" if _MINUS_SIGN.search(text[: pairs[-1].start()]) else ""
    else:
        times = _TIMES.findall(text)
        if len(times) != 2:
            return None
        (start_text, end_text), sign = times, ""
    try:
        start, end = to_seconds(sign + start_text), to_seconds(end_text)
    except ValueError:
        return None
    return (start, end) if start < end else None


def interval_iou(a: tuple[float, float] | None, b: tuple[float, float]) -> float:
    """Intersection over union of two windows in seconds; 0 for None."""
    if a is None:
        return 0.0
    intersection = max(0.0, min(a[1], b[1]) - max(a[0], b[0]))
    return intersection / ((a[1] - a[0]) + (b[1] - b[0]) - intersection)


def _words(text: str) -> list[str]:
    """Words without case, punctuation, apostrophes and articles (as SQuAD scores); numbers stay whole."""
    plain = unicodedata.normalize("NFKC", text).casefold().replace("'", "").replace("’", "")
    words = _WORD.findall(plain)
    return [word for word in words if word not in _ARTICLES] or words


def _multiset_f1(words: list[str], gold: list[str]) -> float:
    shared = sum((Counter(words) & Counter(gold)).values())
    return 2.0 * shared / (len(words) + len(gold))
