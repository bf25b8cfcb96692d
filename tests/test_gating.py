"""Draws must not depend on the process: a group's members, a restart and a resume all see the same K."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from paravt_ray.rollout.gating import draw_frame_budget, stable_hash

BUDGETS = [4, 8, 16, 32, 64]


def test_same_in_another_process_whatever_its_hash_salt() -> None:
    code = (
        "from paravt_ray.rollout.gating import draw_frame_budget as d;"
        "print([d(7, f's{i}', 2, [4, 8, 16, 32, 64]) for i in range(20)])"
    )
    here = str([draw_frame_budget(7, f"s{i}", 2, BUDGETS) for i in range(20)])
    for salt in ("0", "12345"):
        env = {"PYTHONHASHSEED": salt, "PYTHONPATH": ":".join(sys.path)}
        run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert run.stdout.strip() == here


def test_the_draw_is_pinned() -> None:
    """A changed hash would change the data order of every resumed run."""
    assert [draw_frame_budget(0, f"s{i}", 0, BUDGETS) for i in range(8)] == [4, 8, 8, 32, 8, 16, 8, 8]


def test_each_part_matters_and_all_budgets_come_up_equally() -> None:
    draws = {
        (seed, sample, epoch): draw_frame_budget(seed, f"s{sample}", epoch, BUDGETS)
        for seed in range(4)
        for sample in range(500)
        for epoch in range(2)
    }
    counts = Counter(draws.values())
    assert set(counts) == set(BUDGETS)
    assert all(abs(count / len(draws) - 0.2) < 0.03 for count in counts.values())
    same_seed = [draws[0, s, 0] == draws[1, s, 0] for s in range(500)]
    same_epoch = [draws[0, s, 0] == draws[0, s, 1] for s in range(500)]
    assert 0.1 < sum(same_seed) / 500 < 0.3
    assert 0.1 < sum(same_epoch) / 500 < 0.3


def test_parts_do_not_run_into_each_other() -> None:
    assert stable_hash(1, "23") != stable_hash(12, "3")
    assert stable_hash("1", 2) != stable_hash(1, 2)
    assert 0 <= stable_hash("x") < 2**63


def test_no_budgets_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"rollout\.frame_budgets"):
        draw_frame_budget(0, "s", 0, [])
