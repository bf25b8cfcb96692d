"""What the real loop of training needs beside a scripted fleet: samples, groups, and what stands for Ray and MLflow."""

from __future__ import annotations

from pathlib import Path

from scripted_fleet import make_config

from paravt_ray.colocation import Handover
from paravt_ray.config import Config
from paravt_ray.episode import Episode, Group, Sample, Trajectory, TurnRecord
from paravt_ray.evaluation.heldout import in_process
from paravt_ray.parsing import parse_turn
from paravt_ray.rewards import score_episode
from paravt_ray.rewards.outcomes import Outcome
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.tracking.tracker import Tracker
from paravt_ray.trainer import Trainer

SAMPLES = [Sample(f"s{number}", "Which one?", (), "B", "mcq") for number in range(60)]
PROMPTS, SIZE = 3, 4


def rolled_out(spec: GroupSpec, kind: str, version: int) -> Group:
    """The group of a prompt. m: half of its answers are right; r: all are; l: all rollouts but one are lost; g: all."""
    episodes = []
    for index in range({"l": 1, "g": 0}.get(kind, spec.group_size)):
        right = kind != "m" or index % 2 == 0
        turn = parse_turn(f"So it is.\n</think>\n<answer>{'B' if right else 'C'}</answer>", think_prefilled=True)
        trajectory = Trajectory()
        trajectory.append_prompt([1, 2, 3], [1, 2, 3], [])
        trajectory.append_generated([4, 5, 6], [-0.1] * 3, version)
        record = TurnRecord(turn, 3, 6, "stop")
        episodes.append(
            Episode(spec.sample, spec.group_id, index, spec.frame_budget, trajectory, [record], [], True, "answered")
        )
    failures = ["engine: no answer"] * (spec.group_size - len(episodes))
    return Group(spec.group_id, spec.sample, spec.frame_budget, episodes, failures)


class LocalRewards:
    """Scores in this process."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def score_groups(self, groups: list[Group]) -> None:
        for episode in (episode for group in groups for episode in group.episodes):
            episode.rewards = score_episode(episode, self.config)

    def score(self, episodes: list[Episode]) -> list[Outcome]:
        return in_process(self.config)(episodes)

    def judge_metrics(self) -> dict[str, float]:
        return {}


class NoMlflow:
    def problem(self) -> str:
        return ""


def equip(trainer: Trainer, handover: Handover) -> None:
    """Give a trainer its actors, without Ray and MLflow."""
    trainer.handover, trainer.fleet, trainer.learner = handover, handover.fleet, handover.learner
    trainer.rewards = LocalRewards(trainer.config)  # type: ignore[assignment]
    trainer.tracker = Tracker(trainer.run_dir, trainer.progress, NoMlflow())  # type: ignore[arg-type]


def loop_config(folder: Path, rounds: int, staleness: int = 0) -> Config:
    config = make_config(generators=2, concurrency=SIZE)
    config.rollout.prompts_per_step, config.rollout.group_size = PROMPTS, SIZE
    config.rollout.dynamic_sampling, config.rollout.staleness = rounds, staleness
    config.algorithm.kl_coefficient, config.trainer.save_every, config.trainer.steps = 0.0, 1, 5
    config.trainer.run_dir = str(folder / "run")
    return config
