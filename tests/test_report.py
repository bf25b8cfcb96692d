"""The page about a run: what it shows, what it survives, and how it behaves in a real browser."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser
from clips import Recipe, encode, read_number
from PIL import Image
from sample_run import HOSTILE, make_run

from paravt_ray import report
from paravt_ray.errors import InputError, UserError
from paravt_ray.report import curves
from paravt_ray.report.figure import figure
from paravt_ray.report.page import json_block, render
from paravt_ray.report.source import RunData, read_run
from paravt_ray.report.trajectories import choose_steps, read_groups, split_overview


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return make_run(folder, "para_grpo"), make_run(folder, "vanilla_grpo", steps=4, seed=1)


def data_of(page: str) -> dict[str, Any]:
    (block,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    result: dict[str, Any] = json.loads(block)
    return result


# The page


def test_nothing_is_loaded_and_only_the_pages_own_script_may_run(runs: tuple[Path, Path]) -> None:
    page = render([read_run(run) for run in runs])
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.findall(r"""\ssrc=|<(?:link|base|iframe|form)|href="(?!#)|@import|url\(|https?:""", markup)
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="(.*?)"', page)
    for tag, directive in (("style", "style-src"), ("script", "script-src")):
        (code,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"{directive} &#x27;sha256-{digest}&#x27;;" in policy
    assert "default-src &#x27;none&#x27;" in policy
    assert "style=" not in page  # the policy forbids it: such an attribute would do nothing


def test_texts_of_a_run_cannot_leave_their_place(runs: tuple[Path, Path]) -> None:
    page = render([read_run(runs[0])])
    assert page.count("<script") == page.count("</script>") == 2
    assert "<img" not in page
    questions = {group["question"] for group in data_of(page)["runs"][0]["groups"]}
    assert HOSTILE.replace("\ud83d", "?") in questions


@pytest.mark.parametrize("text", ["</script>", "<!--<script>", "]]>&amp;", "\u2028\u2029", "\ud800", "\x00"])
def test_a_json_block_holds_any_text(text: str) -> None:
    block = json_block([text])
    assert json.loads(block) == [text]
    assert block.isascii()
    assert not set(block) & set("<>&")


def test_every_metric_is_drawn_whatever_its_name(runs: tuple[Path, Path]) -> None:
    page = render([read_run(runs[0])])
    logged = set(read_run(runs[0]).series)
    stages = {"time/rollout", "time/reward", "time/train", "time/sync"}
    drawn = set(re.findall(r"<figcaption><span>[^<]* <code>([^<]*)</code>", page))
    assert drawn == logged - stages | {"time/*"}
    titles = re.findall(r"<figcaption><span>([^<]*) <code>", page)
    assert titles[:3] == ["Accuracy reward", "Format reward", "Tool calls per sample"]


def test_two_runs_stand_in_one_figure_with_what_differs(runs: tuple[Path, Path]) -> None:
    page = render([read_run(run) for run in runs])
    (accuracy,) = re.findall(r"<figure class=\"chart\"><figcaption><span>Accuracy reward.*?</figure>", page)
    assert re.findall(r'data-label="(\w+)"', accuracy) == ["para_grpo", "vanilla_grpo"]
    (differing,) = re.findall(r"<h3>What differs</h3>(.*?)<details>", page, re.DOTALL)
    assert re.findall(r"<code>(.*?)</code>", differing) == ["trainer.run_dir", "trainer.seed"]
    assert [run["name"] for run in data_of(page)["runs"]] == ["para_grpo", "vanilla_grpo"]


def test_runs_in_one_folder_are_the_seeds_of_one_curve(tmp_path: Path) -> None:
    from paravt_ray.cli import main

    made = [
        make_run(tmp_path / folder, f"seed_{seed}", seed=seed) for folder in ("at_once", "ahead") for seed in (0, 1)
    ]
    assert main(["report", *map(str, made), "--out", str(tmp_path / "curves.svg")]) == 0
    picture = (tmp_path / "curves.svg").read_text()
    assert "at once (2 seeds)" in picture
    assert re.findall(r'data-label="([^"]*)"', picture) == ["at once", "ahead"] * 3
    others = [make_run(tmp_path / f"other_{number}", "run", steps=1) for number in range(5)]
    with pytest.raises(InputError, match="at most 4 curves"):
        report.run(others, tmp_path / "x.svg")


@pytest.mark.parametrize(("steps", "over"), [(10, 1), (50, 5), (600, 62)])
def test_the_caption_tells_over_how_many_steps_the_curves_are_smoothed(steps: int, over: int) -> None:
    """Seen by a peak of one step in a run with a step 0: so many steps rise with it. Two make a point from 600 on."""
    points = [(step, float(step == steps // 2)) for step in range(1, steps + 1)]
    run = RunData(Path("seed_0"), steps=[*range(steps + 1)], series={"reward/accuracy": points})
    picture = figure([("a", [run])], "t")
    (curve,) = re.findall(r'<polyline class="line c0"[^>]* points="(.*?)"', picture)
    heights = [point.split(",")[1] for point in curve.split()]
    assert sum(height != heights[0] for height in heights) * (2 if steps == 600 else 1) == over
    assert re.findall(r"smoothed over (.*?) steps", picture) == ([str(over)] if over > 1 else [])


def test_what_is_no_seed_of_a_curve_is_refused(tmp_path: Path) -> None:
    one, other = (make_run(tmp_path, f"seed_{seed}", steps=1, seed=seed) for seed in (0, 1))
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("group_size: 8", "group_size: 4"))
    with pytest.raises(InputError, match=r"seed_0 and .*/seed_1 lie in one folder.*\(rollout\.group_size: 8 and 4\)"):
        report.run([one, other], tmp_path / "x.svg")
    begun = make_run(tmp_path, "seed_2", steps=0, seed=2)
    (begun / "metrics.jsonl").write_text('{"step": 0, "eval/reward/total": 1.0}\n')
    with pytest.raises(InputError, match="seed_2 has no finished step"):
        report.run([one, begun], tmp_path / "x.svg")
    (begun / "config.yaml").unlink()
    with pytest.raises(InputError, match=r"seed_2 is damaged\. config\.yaml cannot be read"):
        report.run([one, begun], tmp_path / "x.svg")


def test_the_committed_curves_are_those_of_the_committed_runs(tmp_path: Path) -> None:
    committed = Path(__file__).parents[1] / "docs" / "staleness"
    assert report.run(sorted(committed.glob("*/seed_*")), tmp_path / "curves.svg") == 0
    assert (tmp_path / "curves.svg").read_bytes() == (committed / "curves.svg").read_bytes()


# Trajectories


def test_verdicts_and_failures_are_named(runs: tuple[Path, Path]) -> None:
    first, second = read_groups(read_run(runs[0]))[:2]
    assert (first.step, first.frame_budget, second.frame_budget) == (6, 4, 8)
    assert [(e["verdict"], e["problems"]) for e in first.episodes] == [
        ("right", ["call repeated"]),
        ("right", ["call repeated"]),
        ("wrong", []),
        ("right", ["format not kept", "thinking not closed"]),
    ]
    assert [(e["verdict"], e["problems"]) for e in second.episodes[1:]] == [
        ("wrong", ["format not kept", "out of tokens", "thinking not closed"]),
        ("wrong", []),
        ("wrong", ["call cannot be run", "format not kept"]),
    ]
    assert first.failures[0]["problems"] == ["rollout failed: timeout"]


def test_damaged_records_are_counted_and_the_rest_is_shown(tmp_path: Path) -> None:
    path = make_run(tmp_path, "run", steps=1)
    file = path / "episodes" / "step_000001.jsonl"
    good = json.loads(file.read_text().splitlines()[0])
    bad: list[Any] = [good | change for change in (
        {"frame_budget": "four"}, {"seconds": float("nan")}, {"turns": [{"text": 1}]}, {"sample": None},
        {"frame_budget": 10**400}, {"rewards": {"total": 1}},
    )]  # fmt: skip
    bad.append({**good, "turns": [{**good["turns"][0], "calls": [{**good["turns"][0]["calls"][0], "window": [1]}]}]})
    with file.open("a") as stream:
        stream.writelines(f"{line}\n" for line in [*map(json.dumps, bad), "[1]", "{", "[" * 100_000])
        stream.write('{"group": "still being wri')
    with (path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 1, "train/loss": NaN}\n{"step": true}\nnull\n{"step": 2, "tr')
    run = read_run(path)
    page = render([run])
    shown = data_of(page)["runs"][0]["groups"]
    assert sum(len(group["rollouts"]) for group in shown) == 10
    assert run.notes == [
        "2 lines of metrics.jsonl cannot be read and are left out.",
        "10 trajectories cannot be read and are left out.",
    ]
    assert "10 trajectories cannot be read" in page


def test_of_a_large_run_whole_steps_are_shown_and_it_is_said(runs: tuple[Path, Path]) -> None:
    run = read_run(runs[0])
    size = run.episode_files[0][1].stat().st_size
    groups = read_groups(run, budget=round(3.5 * size))
    assert [group.step for group in groups] == [6, 6, 4, 4, 1, 1] or [g.step for g in groups] == [6, 6, 3, 3, 1, 1]
    assert run.notes[0].startswith("Trajectories of 3 of 6 steps are shown: 1, ")
    assert choose_steps([(1, 5), (2, 5), (3, 5), (9, 5)], 10) == {1, 9}
    assert choose_steps([(1, 5), (2, 50)], 10) == {2}
    assert choose_steps([], 10) == set()


def test_a_step_that_is_too_large_by_itself_is_cut(runs: tuple[Path, Path]) -> None:
    run = read_run(runs[0])
    size = run.episode_files[-1][1].stat().st_size
    groups = read_groups(run, budget=size // 2)
    assert 0 < sum(len(group.episodes) for group in groups) < 8
    assert "only the first ones are shown" in run.notes[1]


def test_an_overview_of_several_videos_is_cut_where_it_was_joined() -> None:
    assert split_overview([1.0, 3.0, 2.0], 2, 3) == [[1.0, 3.0], [2.0]]
    assert split_overview([2.0, 10.0], 2, 2) == [[2.0], [10.0]]  # times do not fall here
    assert split_overview([1.0, 2.0, 0.5], 2, 8) == [[1.0, 2.0], [0.5]]  # clips with fewer frames than asked for
    assert split_overview([1.0], 3, 1) == [[1.0], [], []]
    assert split_overview([], 0, 4) == []


def test_pictures_are_the_frames_that_the_model_saw(tmp_path: Path) -> None:
    clip = encode(Recipe(options={"g": "30"}), tmp_path / "x.mp4")  # 100 frames, 25 a second
    run = read_run(make_run(tmp_path, "run", steps=1, video=str(clip.path)))
    (shown,) = data_of(render([run]))["runs"]
    group = shown["groups"][0]
    (video,) = group["videos"]
    numbers = [read_number(picture(shown, index)) for index in video["pictures"]]
    assert numbers == [round(time_s * 25) for time_s in video["overview"]]
    assert len(numbers) == 4
    assert (video["start"], video["end"], video["exact"]) == (0.0, 4.0, True)
    call = group["rollouts"][0]["turns"][0]["calls"][0]
    assert [read_number(picture(shown, index)) for index in call["pictures"]] == [25, 50]

    clip.path.unlink()
    encode(Recipe(frames=30), clip.path)  # another video under the same name, too short for these times
    assert data_of(render([read_run(run.path)]))["runs"][0]["pictures"] == []


def picture(run: dict[str, Any], index: int) -> Any:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(run["pictures"][index]))))


# Reading


def test_a_run_of_another_version_is_shown_and_nothing_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "hunter2")
    path = make_run(tmp_path, "run", steps=1)
    (path / "config.yaml").write_text(
        "rollout: {gone_key: 7}\nmodel: {path: '${oc.env:A_SECRET}'}\ntracking: {uri: 'https://me:hunter2@host/x'}\n"
    )
    page = render([read_run(path)])
    assert "rollout.gone_key" in page
    assert "https://host/x" in page
    assert "hunter2" not in page


def test_a_broken_configuration_is_told_and_the_curves_are_shown(tmp_path: Path) -> None:
    path = make_run(tmp_path, "run", steps=2)
    (path / "config.yaml").write_text("{")
    page = render([read_run(path)])
    assert "config.yaml cannot be read" in page
    assert "<svg" in page


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    page = render([read_run(make_run(tmp_path, "run", steps=0))])
    assert "No step is finished yet." in page


def test_what_is_no_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no run directory"):
        read_run(tmp_path / "missing")
    with pytest.raises(InputError, match="holds no run"):
        read_run(tmp_path)
    path = make_run(tmp_path, "run", steps=1)
    with pytest.raises(InputError, match=r"or two to compare.*--out FILE\.svg"):
        report.run([path] * 3, tmp_path / "x.html")
    with pytest.raises(UserError, match="cannot be written"):
        report.run([path], tmp_path / "missing" / "x.html")


def test_the_command_writes_the_page(runs: tuple[Path, Path], tmp_path: Path) -> None:
    from paravt_ray.cli import main

    assert main(["report", *map(str, runs), "--out", str(tmp_path / "page.html")]) == 0
    assert "para_grpo and vanilla_grpo" in (tmp_path / "page.html").read_text()
    assert main(["report", str(runs[0])]) == 0
    assert (runs[0] / "report.html").stat().st_size > 10_000
    assert main(["report", str(tmp_path / "missing")]) == 2


def test_what_the_page_is_made_of_is_packaged() -> None:
    root = Path(__file__).parents[1]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["paravt_ray"]
    package = root / "paravt_ray"
    packaged = {file for pattern in patterns for file in package.glob(pattern)}
    assert {f for f in (package / "report").iterdir() if f.suffix in (".css", ".js", ".html")} <= packaged


# Curves


def test_a_curve_goes_through_its_values() -> None:
    svg = curves.line_chart("t", [curves.Line("a", "run", [(1, 0.0), (2, 0.5), (3, 1.0)])], (1, 3))
    (points,) = re.findall(r'data-label="run" points="(.*?)"', svg)
    left, right = curves.LEFT, curves.WIDTH - curves.RIGHT
    top, bottom = curves.TOP, curves.HEIGHT - curves.BOTTOM
    assert points == f"{left:.1f},{bottom:.2f} {(left + right) / 2:.1f},{(top + bottom) / 2:.2f} {right:.1f},{top:.2f}"


def test_bars_are_as_high_as_their_seconds() -> None:
    layers = [curves.Line("x", "rollout", [(1, 6.0)]), curves.Line("y", "train", [(1, 2.0)])]
    svg = curves.bar_chart("t", layers, (1, 1), 8.0)
    heights = [float(height) for height in re.findall(r'<rect class="bar .*? height="([\d.]+)"', svg)]
    assert heights[0] / heights[1] == pytest.approx(3.0, rel=0.01)
    assert sum(heights) == pytest.approx(curves.HEIGHT - curves.TOP - curves.BOTTOM, rel=0.01)


RANGES = [(0, 1), (-0.3, 1.93), (2e-6, 2e-6), (0, 0), (-5, -5), (1e9, 3e9), (0.998, 1)]


@pytest.mark.parametrize(("low", "high"), RANGES)
def test_ticks_are_round_and_enclose_the_values(low: float, high: float) -> None:
    ticks = curves.nice_ticks(low, high)
    assert 2 <= len(ticks) <= 7
    assert ticks[0] <= low or ticks[0] == pytest.approx(low)
    assert ticks[-1] >= high or ticks[-1] == pytest.approx(high)
    assert len(set(curves.tick_labels(ticks))) == len(ticks)


def test_many_points_become_means() -> None:
    points = [(step, float(step % 2)) for step in range(1, 1001)]
    thinned = curves.in_buckets(points, 100)
    assert len(thinned) == 100
    assert all(value == pytest.approx(0.5) for _, value in thinned)
    assert curves.moving_mean([(1, 0.0), (2, 3.0), (3, 0.0)], 1) == [(1, 0.0), (2, 1.0), (3, 0.0)]


# In a browser


def choose(browser: Browser, name: str, value: str) -> None:
    browser.ask(
        f"(() => {{ const box = document.querySelector('[data-filter={name}]'); box.value = {json.dumps(value)};"
        " box.dispatchEvent(new Event(box.tagName === 'SELECT' ? 'change' : 'input', {bubbles: true})); })()"
    )


@pytest.mark.parametrize(("width", "phone"), [(1280, False), (390, True)], ids=["desktop", "phone"])
def test_in_a_browser(browser: Browser, runs: tuple[Path, Path], tmp_path: Path, width: int, phone: bool) -> None:
    assert report.run(list(runs), tmp_path / "page.html") == 0
    browser.open((tmp_path / "page.html").as_uri(), width, phone)
    found = "[...document.querySelectorAll('.found')].map((e) => e.textContent.trim())"
    assert browser.ask(found) == ["para_grpo 60 of 60 trajectories", "vanilla_grpo 40 of 40 trajectories"]
    fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    assert browser.ask(fits)  # nothing sticks out

    choose(browser, "k", "8")
    choose(browser, "problem", "call cannot be run")
    assert browser.ask(found) == ["para_grpo 6 of 60 trajectories", "vanilla_grpo 4 of 40 trajectories"]
    assert browser.ask("location.hash") == "#k=8&problem=call+cannot+be+run"
    choose(browser, "problem", "")
    choose(browser, "verdict", "right")
    choose(browser, "step", "4")
    assert browser.ask(found) == ["para_grpo 1 of 60 trajectories", "vanilla_grpo 1 of 40 trajectories"]

    browser.ask("document.querySelectorAll('.episode summary').forEach((summary) => summary.click())")
    time.sleep(0.3)  # `toggle` comes later
    text = browser.ask("document.querySelector('.episode .body').innerText")
    assert "I look at both places" in text
    assert "the ball is red" in text
    assert [text.count(f"Call {number}") for number in (1, 2, 3)] == [1, 1, 0]
    assert browser.ask("document.querySelectorAll('.body .time .window.served').length") == 2
    assert browser.ask(fits)
    assert browser.ask("document.title") == "ParaVT: para_grpo and vanilla_grpo"  # nothing hostile has run
    assert browser.complaints() == []


def test_a_link_with_filters_and_the_values_under_the_pointer(
    browser: Browser, runs: tuple[Path, Path], tmp_path: Path
) -> None:
    assert report.run([runs[0]], tmp_path / "page.html") == 0
    browser.open(f"{(tmp_path / 'page.html').as_uri()}#verdict=wrong&step=6", 1280)
    assert browser.ask("document.querySelector('.found').textContent.trim()") == "4 of 60 trajectories"
    values = browser.ask(
        "(() => { const figures = [...document.querySelectorAll('.chart')];"
        " const figure = figures.find((f) => f.textContent.includes('train/loss'));"
        " const svg = figure.querySelector('svg'), box = svg.getBoundingClientRect();"
        " const clientX = box.left + box.width * 44 / 360;"
        " svg.dispatchEvent(new PointerEvent('pointermove', {clientX, clientY: box.top}));"
        " return figure.querySelector('output').textContent; })()"
    )
    assert values == "step 11"  # step 1, where the loss is 1
    assert browser.complaints() == []
