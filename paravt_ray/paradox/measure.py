"""What is asked of a generator fleet outside training: a cold start's mechanism, and a checkpoint's other dispatch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from paravt_ray.chat import Chat
from paravt_ray.config import Config, model_directory
from paravt_ray.data.reader import read_samples
from paravt_ray.episode import Sample
from paravt_ray.errors import UserError
from paravt_ray.evaluation.benchmark import started_fleet
from paravt_ray.evaluation.heldout import Fleet, evaluate, in_process, report
from paravt_ray.paradox.mechanism import GroupRecord
from paravt_ray.rollout.gating import draw_frame_budget
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.tracking.run_dir import RunDir
from paravt_ray.weights.digest import model_digest


class MeasurementError(UserError):
    """Nothing could be measured; the message says why."""


def measure(config: Config, prior: str, run: RunDir, say: Callable[[str], None]) -> list[GroupRecord]:
    """Sample a cold start on the first training questions (see `sample_mechanism`).

    Args:
        config: of the GRPO arm with the cold start as its model.
        prior: the cold start's name.
        run: where logs go.
        say: tells people what is being done.

    Raises:
        UserError: the fleet did not start, is gone, or gave no episode.
    """
    config.model.path = str(model_directory(config))
    data = config.data
    samples = read_samples(data.train, data.video_root, data.max_unusable)[0][: config.paradox.prompts]
    chat = Chat.from_pretrained(config.model.path, config.model.frames_as)
    with started_fleet(config, chat, run.logs) as fleet:
        return sample_mechanism(fleet, samples, config, prior, say)


def sample_mechanism(
    fleet: Fleet, samples: Sequence[Sample], config: Config, prior: str, say: Callable[[str], None]
) -> list[GroupRecord]:
    """Roll the samples out at every K, and at every temperature with the K that gating draws.

    Raises:
        MeasurementError: not one episode came out of it.
    """
    digest, records = model_digest(Path(config.model.path)), []
    for sweep, temperature, budgets in _sweeps(config, samples):
        shown = f"K={budgets[0]}" if sweep == "budget" else f"temperature {temperature:g}"
        say(f"{prior} prior, {len(samples)} questions at {shown}")
        asked = config.rollout.group_size if temperature > 0 else 1
        specs = [
            GroupSpec(f"{sweep}/{shown}/{number}", sample, budget, asked, temperature, config.trainer.seed)
            for number, (sample, budget) in enumerate(zip(samples, budgets, strict=True))
        ]
        groups = fleet.rollout(specs)
        if not report(asked * len(specs), groups, in_process(config)).scored:  # sets the rewards
            reasons = sorted({reason for group in groups for reason in group.failures})
            raise MeasurementError(f"No rollout of the {prior} prior at {shown} succeeded: {'; '.join(reasons[:3])}")
        for group in groups:
            record = GroupRecord(prior, digest, group.sample.sample_id, group.frame_budget, temperature, sweep)
            record.fill(group, asked)
            records.append(record)
    return records


def _sweeps(config: Config, samples: Sequence[Sample]) -> Iterator[tuple[str, float, list[int]]]:
    """What is varied, the temperature, and each sample's K."""
    rollout, seed = config.rollout, config.trainer.seed
    for budget in rollout.frame_budgets:
        yield "budget", rollout.temperature, [budget] * len(samples)
    drawn = [draw_frame_budget(seed, sample.sample_id, 0, rollout.frame_budgets) for sample in samples]
    for temperature in config.paradox.temperatures:
        yield "temperature", temperature, drawn


def evaluate_checkpoint(config: Config, model: Path, run: RunDir) -> None:
    """Ask the held-out questions as training does at its end, and log the answer as the last step's metrics.

    Raises:
        UserError: the fleet did not start or is gone.
    """
    config.model.path = str(model)
    data, trainer = config.data, config.trainer
    held_out = read_samples(data.valid, data.video_root, data.max_unusable)[0][: trainer.eval_samples or None]
    with started_fleet(config, Chat.from_pretrained(model, config.model.frames_as), run.logs) as fleet:
        budgets, tag = trainer.eval_budgets or None, f"eval/{trainer.steps}"
        found = evaluate(fleet, held_out, config, budgets, tag=tag, score=in_process(config))
    run.log_metrics(trainer.steps, {f"eval/{name}": value for name, value in found.flat().items()})
