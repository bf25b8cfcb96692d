"""What is asked of a generator fleet outside training: a cold start's mechanism, and a checkpoint's other dispatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from paravt_ray.chat import Chat
from paravt_ray.config import Config, model_directory
from paravt_ray.data.reader import read_samples
from paravt_ray.episode import Sample
from paravt_ray.errors import UserError
from paravt_ray.evaluation.benchmark import started_fleet
from paravt_ray.evaluation.heldout import evaluate, report
from paravt_ray.evaluation.results import model_digest
from paravt_ray.paradox.mechanism import GroupRecord, fill_record
from paravt_ray.rollout.gating import draw_frame_budget
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.tracking.run_dir import RunDir

Say = Callable[[str], None]


class MeasurementError(UserError):
    """Nothing could be measured; the message says why."""


def measure(config: Config, prior: str, run: RunDir, say: Say) -> list[GroupRecord]:
    """Sample the first training questions at every K, and at every temperature with the K that gating draws.

    Args:
        config: of the GRPO arm with the cold start as its model.
        prior: the cold start's name.
        run: where logs go.
        say: tells people what is being done.

    Raises:
        MeasurementError: not one episode came out of it.
        UserError: the fleet did not start or is gone.
    """
    model = model_directory(config)
    config.model.path = str(model)
    digest, size = model_digest(model), config.rollout.group_size
    data = config.data
    samples = read_samples(data.train, data.video_root, data.max_unusable)[0][: config.paradox.prompts]
    records: list[GroupRecord] = []
    with started_fleet(config, Chat.from_pretrained(config.model.path), run.logs) as fleet:
        for sweep, temperature, budgets in _sweeps(config, samples):
            shown = f"K={budgets[0]}" if sweep == "budget" else f"temperature {temperature:g}"
            say(f"{prior} prior, {len(samples)} questions at {shown}")
            asked = size if temperature > 0 else 1
            specs = [
                GroupSpec(f"{sweep}/{shown}/{number}", sample, budget, asked, temperature, config.trainer.seed)
                for number, (sample, budget) in enumerate(zip(samples, budgets, strict=True))
            ]
            groups = fleet.rollout(specs)
            report(asked * len(specs), groups, config)  # sets the rewards
            if not any(group.episodes for group in groups):
                reasons = sorted({reason for group in groups for reason in group.failures})
                raise MeasurementError(
                    f"No rollout of the {prior} prior at {shown} gave an episode: {'; '.join(reasons[:3])}. "
                    f"Logs are in {run.logs}."
                )
            for group in groups:
                record = GroupRecord(prior, digest, group.sample.sample_id, group.frame_budget, temperature, sweep)
                records.append(fill_record(record, group, asked))
    return records


def _sweeps(config: Config, samples: list[Sample]) -> Iterator[tuple[str, float, list[int]]]:
    """What is varied, the temperature, and each sample's K."""
    rollout, seed = config.rollout, config.trainer.seed
    for budget in rollout.frame_budgets:
        yield "budget", rollout.temperature, [budget] * len(samples)
    drawn = [draw_frame_budget(seed, sample.sample_id, 0, rollout.frame_budgets) for sample in samples]
    for temperature in config.paradox.temperatures:
        yield "temperature", temperature, drawn


def evaluate_checkpoint(config: Config, model: Path, run: RunDir) -> None:
    """Ask the held-out questions as training does at its end, and log the answer as that step's metrics.

    Args:
        config: of the arm; its last step is the step.
        model: the checkpoint's model.
        run: the arm's run directory.
    """
    config.model.path = str(model)
    data, trainer = config.data, config.trainer
    held_out = read_samples(data.valid, data.video_root, data.max_unusable)[0][: trainer.eval_samples or None]
    with started_fleet(config, Chat.from_pretrained(model), run.logs) as fleet:
        found = evaluate(fleet, held_out, config, trainer.eval_budgets or None, tag=f"eval/{trainer.steps}")
    run.log_metrics(trainer.steps, {f"eval/{name}": value for name, value in found.flat().items()})
