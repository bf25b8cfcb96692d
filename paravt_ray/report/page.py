"""The page: one HTML file that loads nothing, runs nothing but its own script, and trusts no text that it shows.

Texts from runs (questions, what models wrote, names) are data: in the HTML they are escaped, the trajectories travel as
JSON in a block that cannot be left, and the script puts them into the document as text nodes only. A content security
policy allows the page's own style and script, by their hashes, and pictures that are part of the file.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from paravt_ray.config import Config, config_items
from paravt_ray.report.panels import RUN_CLASSES, curves_html, headline_html
from paravt_ray.report.source import RunData
from paravt_ray.report.thumbnails import take_pictures
from paravt_ray.report.trajectories import read_groups


def render(runs: Sequence[RunData]) -> str:
    """The page about one run or two."""
    trajectories = [_trajectories(css, run) for css, run in zip(RUN_CLASSES, runs, strict=False)]
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    names = " and ".join(run.name for run in runs)
    return Template(_asset("page.html")).substitute(
        policy=escape(policy),
        title=_text(f"ParaVT: {names}"),
        count=len(runs),
        style=style,
        script=script,
        heads="".join(_head(css, run) for css, run in zip(RUN_CLASSES, runs, strict=False)),
        notes=_notes(runs),
        headline=headline_html(runs),
        curves=curves_html(runs),
        configuration=_configuration(runs),
        data=json_block({"runs": trajectories}),
    )


def json_block(value: Any) -> str:
    """JSON that stays inside its `<script>` element, whatever texts it holds: no `<`, `>` or `&`, and ASCII only.

    Raises:
        ValueError: a number is not finite.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _trajectories(css: str, run: RunData) -> dict[str, Any]:
    groups = read_groups(run)
    pictures = take_pictures(run, groups)
    shown = [group.shown() for group in groups]
    return {"name": run.name, "css": css, "groups": shown, "pictures": pictures.jpegs}


def _head(css: str, run: RunData) -> str:
    planned = int(run.number("trainer.steps", 0))
    done = f"step {run.steps[-1]}" if run.steps else "no step finished"
    facts = [
        f"{done} of {planned}" if planned else done,
        f"model {run.config.get('model.path', 'unknown')}",
        f"seed {run.config.get('trainer.seed', 'unknown')}",
    ]
    return (
        f'<div class="run"><h1><i class="key {css}"></i>{_text(run.name)}</h1>'
        f"<p>{_text(', '.join(facts))}</p><p><code>{_text(str(run.path))}</code></p></div>"
    )


def _notes(runs: Sequence[RunData]) -> str:
    lines = [f"<li>{_text(run.name)}: {_text(note)}</li>" for run in runs for note in run.notes]
    return f'<ul class="notes">{"".join(lines)}</ul>' if lines else ""


def _configuration(runs: Sequence[RunData]) -> str:
    """What differs (between the runs, or from the defaults), and behind it everything."""
    keys = sorted({key for run in runs for key in run.config})
    everything = [(run.name, run.config) for run in runs]
    title = "What differs" if len(runs) > 1 else "What differs from the defaults"
    columns = everything if len(runs) > 1 else [*everything, ("default", config_items(Config()))]
    different = [key for key in keys if len({str(values.get(key, "")) for _, values in columns}) > 1]
    table = _table(different, columns) if different else "<p>Nothing.</p>"
    return (
        f"<h3>{title}</h3>{table}<details><summary>All {len(keys)} keys</summary>{_table(keys, everything)}</details>"
    )


def _table(keys: Sequence[str], columns: Sequence[tuple[str, dict[str, Any]]]) -> str:
    head = "".join(f"<th>{_text(name)}</th>" for name, _ in columns)
    rows = "".join(
        f"<tr><th><code>{_text(key)}</code></th>"
        + "".join(f"<td>{_text(str(values.get(key, '–')))}</td>" for _, values in columns)
        + "</tr>"
        for key in keys
    )
    return f'<div class="wide"><table><thead><tr><td></td>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _text(text: str) -> str:
    # Lone surrogates (half a sampled character, an odd file name) have no UTF-8 form.
    return escape(text.encode("utf-8", "replace").decode())


def _asset(name: str) -> str:
    return files("paravt_ray.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
