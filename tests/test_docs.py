"""The docs against the program: what they name exists, and what is made from the code is made from this code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sample_run import make_run

from paravt_ray import report
from paravt_ray.config import Config, config_items
from paravt_ray.config_docs import document, sections
from paravt_ray.report.source import read_run

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))


def test_the_configuration_page_is_that_of_this_configuration() -> None:
    committed = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert committed == document(), "run: python -m paravt_ray.config_docs > docs/configuration.md"


def test_every_section_and_key_has_its_row() -> None:
    keys = [f"{section}.{key}" for section, (_, texts) in sections().items() for key in texts]
    assert keys == list(config_items(Config()))


def test_the_curves_of_synchronous_and_asynchronous_runs_are_those_of_their_records(tmp_path: Path) -> None:
    folder = ROOT / "docs" / "staleness"
    runs = sorted(folder.glob("*/seed_*"))
    assert {read_run(run).config["rollout.staleness"] for run in runs if run.parent.name == "synchronous"} == {0}
    assert {read_run(run).config["rollout.staleness"] for run in runs if run.parent.name == "one_version_ahead"} == {1}
    assert report.run(runs, tmp_path / "curves.svg") == 0
    assert (tmp_path / "curves.svg").read_bytes() == (folder / "curves.svg").read_bytes()


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"\]\(((?!https?:|#)[^)#]+)", text))
    missing = sorted(link for link in named if not (page.parent / link).exists())
    files = set(re.findall(r"`((?:paravt_ray|tool_workers|cluster|tests|docs)/[\w./-]+\.\w+)", text))
    missing += sorted(file for file in files if not (ROOT / file).exists())
    known = config_items(Config())
    keys = set(re.findall(rf"`(?:\S* )?((?:{'|'.join(sections())})\.[a-z]\w*)(?==|`)", text))
    missing += sorted(key for key in keys if key not in known and not (ROOT / "paravt_ray" / key).exists())
    assert missing == []


def test_every_metric_of_a_step_is_explained(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    measured = [name for name in read_run(make_run(tmp_path, "run", steps=1)).series if not name.startswith("eval/")]
    assert len(measured) > 20
    assert [name for name in measured if f"`{name}`" not in text] == []
