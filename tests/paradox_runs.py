"""Made-up runs of the comparison's arms, as the project's own writers leave them. Quick to import."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from paravt_ray.config import Config
from paravt_ray.paradox.arms import ARMS, Arm
from paravt_ray.paradox.plan import Plan
from paravt_ray.tracking.run_dir import RunDir

ROOT = Path(__file__).parents[1]
STEPS = 12


def make_plan(folder: Path, *overrides: str, weak: bool = True) -> Plan:
    """The project's configuration with cold starts that hold no weights."""
    for prior in ("strong", "weak"):
        (folder / prior).mkdir(parents=True, exist_ok=True)
        (folder / prior / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "prior": prior}))
    models = [f"model.path={folder}/strong", f"paradox.weak_model={f'{folder}/weak' if weak else ''}"]
    own = [f"trainer.steps={STEPS}", f"trainer.run_dir={folder}/runs", *models]
    return Plan.load(str(ROOT / "configs" / "paradox.yaml"), [*own, *overrides])


def metrics(arm: Arm, seed: int, step: int) -> dict[str, float]:
    """Different for every arm, seed and step."""
    place = ARMS.index(arm) + 1
    evaluated = {f"eval/accuracy/k{k}": 0.4 + place / 50 + seed / 100 for k in (4, 8, 16, 32, 64)}
    evaluated |= {"eval/accuracy/overall": 0.5, "eval/tool/call_rate": 0.3, "eval/scored": 120.0}
    if step == 0:
        return evaluated
    training = {
        "reward/accuracy": 0.3 + step / 100 + seed / 10,
        "reward/format": place / 20 + seed / 100,
        "tool/call_rate": 1.0 / step,
        "tool/width": 2.0 + seed if step % 2 else 0.0,
        "format/think_closed": 0.9,
        "format/answer_closed": 0.8,
        "format/compliance": 0.7,
    }
    return training | (evaluated if step == STEPS else {})


def finish(config: Config, arm: Arm, steps: Sequence[int] = range(STEPS + 1)) -> None:
    """A run of these steps; of an arm that is not trained, its evaluation."""
    with RunDir(config) as run:
        for step in [STEPS] if arm.checkpoint_of else steps:
            run.log_metrics(step, metrics(arm, config.trainer.seed, step))
