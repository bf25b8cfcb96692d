"""Samples for lmms-eval: a file that its offline scorer reads, to check our scores against another program's.

Its scorers take the first capital letter, or the first `m - n`, of a response. They are given what our parser read
from the answer and nothing around it, so that a letter inside a sentence is not taken for the choice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from paravt_ray.episode import QuestionType
from paravt_ray.evaluation.results import Result
from paravt_ray.evaluation.splits import Question
from paravt_ray.rewards.accuracy import parse_window
from paravt_ray.rewards.choices import chosen_option
from paravt_ray.tracking.run_dir import replace_file


def write_samples(file: Path, questions: Mapping[str, Question], results: Mapping[str, Result]) -> None:
    """Write one line for each result, with the question of the same key."""
    lines = []
    for key, result in results.items():
        question = questions[key]
        document = json.dumps(question.document, indent=2, default=str, ensure_ascii=False)
        sample = {
            "doc_id": question.row,
            "doc_hash": hashlib.sha256(document.encode("utf-8", "replace")).hexdigest(),
            "target": question.sample.answer,
            "filtered_resps": [response(result.answer, result.question_type)],
            "resps": [[result.answer or ""]],
            "input": question.sample.question,
        }
        lines.append(json.dumps(sample, ensure_ascii=True) + "\n")
    replace_file(file, "".join(lines))


def response(answer: str | None, question_type: QuestionType) -> str:
    """What an answer says, in the words that lmms-eval reads; empty for none."""
    if answer is None:
        return ""
    if question_type == "mcq":
        return chosen_option(answer) or ""
    if question_type == "tvg":
        window = parse_window(answer)
        return f"The event happens in the {window[0]:g} - {window[1]:g} seconds." if window else ""
    return answer
