"""The main loop: prompts, rollouts, rewards, advantages, update, push; and what stands around it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from paravt_ray.chat import Chat
from paravt_ray.cluster import connected
from paravt_ray.colocation import shared_placement, started
from paravt_ray.config import Config, model_directory
from paravt_ray.data.reader import read_samples
from paravt_ray.doctor import check_resources
from paravt_ray.episode import Group, Sample
from paravt_ray.errors import InputError, UserError
from paravt_ray.evaluation.heldout import evaluate
from paravt_ray.learner.actor import LearnerGroup
from paravt_ray.learner.resume import Origin, check_resume
from paravt_ray.learner.rows import build_rows, has_signal, set_advantages
from paravt_ray.learner.schedule import LrSchedule
from paravt_ray.prompts import PromptQueue
from paravt_ray.rewards.actor import RewardPool
from paravt_ray.rollout.canary import canary_row, check_canary
from paravt_ray.rollout.fleet import GeneratorFleet
from paravt_ray.rollout.frames import crop_pool
from paravt_ray.tracking.logs import log_to_file
from paravt_ray.tracking.metrics import step_metrics
from paravt_ray.tracking.mlflow_log import MlflowLogger
from paravt_ray.tracking.progress import Progress
from paravt_ray.tracking.run_dir import RunDir, read_metrics
from paravt_ray.tracking.tracker import Tracker


class TrainingError(UserError):
    """The run cannot go on; the message says why and what is kept."""


def train(config: Config) -> int:
    """Train as configured and return the exit code.

    Raises:
        UserError: with the cause and the way out.
    """
    if not config.data.train:
        raise InputError("data.train is empty: name a parquet file with questions (`paravt data synth` makes one).")
    data = config.data
    samples, found = read_samples(data.train, data.video_root, data.max_unusable)
    held_out = read_samples(data.valid, data.video_root, data.max_unusable)[0] if data.valid else []
    model = model_directory(config)
    with ExitStack() as stack:
        run = stack.enter_context(RunDir(config))
        log_to_file(run.logs)
        progress = stack.enter_context(Progress(config.trainer.steps))
        progress.say(f"Run directory: {run.path}\n{found.sentence()}")
        trainer = Trainer(config, model, samples, run, progress)
        progress.stage("connecting to Ray")
        stack.enter_context(connected(config, run.logs))
        progress.say(check_resources(config))
        stack.enter_context(trainer)
        stack.callback(progress.stage, "ending the engines and Ray", "a few seconds")
        trainer.run(held_out[: config.trainer.eval_samples or None])
    return 0


class Trainer:
    """Owns the actors of a run. Use it as a context manager: leaving it ends them all, however it is left."""

    def __init__(self, config: Config, model: Path, samples: Sequence[Sample], run: RunDir, progress: Progress) -> None:
        """See where the run goes on; nothing is started or changed yet.

        Args:
            config: the run's.
            model: checkpoint directory that training starts from, and the reference policy.
            samples: to train on.
            run: where results go.
            progress: where people look.

        Raises:
            CheckpointError: the run cannot go on from its newest complete checkpoint.
        """
        self.config, self.model, self.run_dir, self.progress = config, model, run, progress
        self.prompts = PromptQueue(config, samples)
        progress.stage("reading the model's files", "a minute for a large model")
        self.origin = Origin.of(config, model, (sample.content() for sample in samples))
        self.chat = Chat.from_pretrained(model, config.model.frames_as)
        self.resume = check_resume(run.checkpoints, self.origin, LrSchedule.of_training(config))
        """Where the run goes on; None at its beginning."""
        self.version = self.resume.step if self.resume else 0
        """Steps done, and the version of the weights that the learner holds after them."""
        if self.resume:
            self.prompts.restore(self.resume.state["stream"], self.version)
        self.seconds: dict[str, float] = {}
        """What the stages of a step took."""
        self._stack = ExitStack()

    def __enter__(self) -> Trainer:
        """Start all actors, the slow ones at the same time; on resume, from the newest complete checkpoint."""
        with ExitStack() as stack:
            self.run_dir.rewind(self.version if self.resume else -1)
            mlflow = stack.enter_context(MlflowLogger(self.run_dir, self.config))
            self.tracker = Tracker(self.run_dir, self.progress, mlflow)
            self.progress.stage("starting the engines and the learner", "30 to 60 s")
            self.pool = crop_pool(self.config, self.chat.patch_factor)
            stack.callback(self.pool.close)
            group = stack.enter_context(shared_placement(self.config))
            fleet = GeneratorFleet(self.config, self.pool, self.run_dir.logs, placement_group=group)
            checkpoint = self.resume.checkpoint if self.resume else None
            learner = partial(LearnerGroup, self.config, self.model, resume=checkpoint, placement_group=group)
            self.handover = stack.enter_context(started(fleet, learner, shared=group is not None))
            self.fleet, self.learner = self.handover.fleet, self.handover.learner
            self.rewards = RewardPool(self.config)
            stack.callback(self.rewards.close)
            self.push()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def run(self, held_out: Sequence[Sample]) -> None:
        """Evaluate, do all steps, evaluate again."""
        if self.version == 0:
            self.tracker.log_start(self.evaluate(held_out))
        last = self.config.trainer.steps
        for step in range(self.version + 1, last + 1):
            due = step == last or (self.config.trainer.eval_every and step % self.config.trainer.eval_every == 0)
            self.step(step, held_out if due else [])
        self.progress.closing(read_metrics(self.run_dir.metrics_file), self.run_dir.path)

    def step(self, step: int, held_out: Sequence[Sample]) -> None:
        """Every stage of one step, once, in order; evaluated on `held_out` afterwards."""
        started = time.perf_counter()
        self.seconds.clear()

        # 1. The next prompts, each with its overview budget K, go to the generators; whole groups come back.
        with self.stage("rollout"):
            groups = self.prompts.roll_out(self.fleet, step)

        # 2. Every episode is scored from its execution records. Groups that lost too many are left out; where they and
        #    those without signal are to be replaced, further prompts go through the same two stages.
        with self.stage("reward"):
            self.rewards.score_groups(groups)
        groups += self.resample(step, groups)
        chosen = self.choose(groups)

        # 3. Rewards become advantages, per group and per token; the learner takes its optimizer steps.
        with self.stage("train"):
            self.handover.to_learner()
            rows = build_rows(chosen, self.config)
            if self.config.algorithm.kl_coefficient > 0 and self.config.algorithm.kl_placement == "reward":
                self.learner.add_reference_logprobs(rows)
            set_advantages(rows, chosen, self.chat, self.config)
            metrics = self.learner.update(rows)

        # 4. The new weights go to every generator, and a canary proves that they arrived.
        with self.stage("sync"):
            self.version = step
            metrics |= self.push()

        # 5. What happened is written down; now and then, everything needed to go on from here.
        metrics["time/step"] = time.perf_counter() - started
        # With staleness the generators work all through the step, and the wait for groups says nothing of their speed.
        sampling = metrics["time/step"] if self.config.rollout.staleness else self.seconds["rollout"]
        metrics |= step_metrics(groups, sampling, step - 1) | self.rewards.judge_metrics()
        if self.config.rollout.dynamic_sampling:
            resampled = len(groups) - self.config.rollout.prompts_per_step
            metrics |= {"rollout/resampled": float(resampled), "rollout/trained_groups": float(len(chosen))}
        metrics |= self.evaluate(held_out)
        metrics |= {f"time/{name}": seconds for name, seconds in self.seconds.items()}
        self.tracker.log_step(step, metrics, groups)
        every = self.config.trainer.save_every
        if step == self.config.trainer.steps or (every and step % every == 0):
            self.save(step)

    def resample(self, step: int, groups: Sequence[Group]) -> list[Group]:
        """Roll out and score further prompts, at most `rollout.dynamic_sampling` times as many as there lack groups."""
        further: list[Group] = []
        for _ in range(self.config.rollout.dynamic_sampling):
            first = len(groups) + len(further)
            missing = self.config.rollout.prompts_per_step - len(self.with_signal([*groups, *further]))
            if missing == 0:
                break
            with self.stage("rollout", f"{missing} further prompts in place of groups without signal"):
                found = self.prompts.roll_out_further(self.fleet, step, range(first, first + missing))
            with self.stage("reward"):
                self.rewards.score_groups(found)
            further += found
        return further

    def choose(self, groups: Sequence[Group]) -> list[Group]:
        """The groups that are learned from: those that are complete, or those of them with signal if that is asked for.

        Where none has signal, one step's worth of complete groups is taken, which only the KL term then moves.

        Raises:
            TrainingError: none is complete.
        """
        smallest = self.config.rollout.min_group_size
        complete = [group for group in groups if len(group.episodes) >= smallest]
        if not complete:
            reasons = sorted({failure for group in groups for failure in group.failures})
            raise TrainingError(
                f"No group of step {self.version + 1} has {smallest} finished episodes. "
                f"Reasons: {'; '.join(reasons[:3]) or 'none given'}. Logs are in {self.run_dir.logs}."
            )
        if self.config.rollout.dynamic_sampling:
            return self.with_signal(complete) or complete[: self.config.rollout.prompts_per_step]
        return complete

    def with_signal(self, groups: Sequence[Group]) -> list[Group]:
        """The complete groups whose rewards differ."""
        smallest = self.config.rollout.min_group_size
        return [group for group in groups if len(group.episodes) >= smallest and has_signal(group, self.config)]

    def push(self) -> dict[str, float]:
        """Send the learner's weights to all generators and have each prove that it holds them.

        Raises:
            CanaryError: a generator answers as if it held others.
        """
        started = time.perf_counter()
        push = self.learner.publish(self.version)
        self.handover.to_generators(push)
        runs = self.fleet.canary()
        self.handover.to_learner()
        logprobs = self.learner.logprobs([canary_row(run) for run in runs])
        gap = check_canary(runs, logprobs, self.version, self.config.model.dtype)
        self.fleet.agree(runs[0])
        self.handover.to_generators()
        return {
            "sync/seconds": time.perf_counter() - started,
            "sync/bytes": float(push.nbytes),
            "sync/version": float(self.version),
            "sync/canary_gap": gap,
        }

    def evaluate(self, held_out: Sequence[Sample]) -> dict[str, float]:
        """Ask every held-out question greedily at its K (`trainer.eval_budgets`); nothing is learned. `eval/...`."""
        if not held_out:
            return {}
        budgets = self.config.trainer.eval_budgets or None
        with self.stage("evaluation", f"{len(held_out)} held-out questions"):
            tag = f"eval/{self.version}"
            found = evaluate(self.fleet, held_out, self.config, budgets, tag=tag, score=self.rewards.score)
        return {f"eval/{name}": value for name, value in (found.flat() | self.rewards.judge_metrics()).items()}

    def save(self, step: int) -> None:
        """Write a checkpoint from which `trainer.resume=auto` goes on, with the prompts that no step has consumed."""
        with self.stage("checkpoint"):
            state = self.origin.state(step, stream=self.prompts.state())
            self.handover.to_learner()
            self.learner.save(self.run_dir.checkpoint(step), state, self.config.trainer.keep_checkpoints)
            self.handover.to_generators()

    @contextmanager
    def stage(self, name: str, hint: str = "") -> Iterator[None]:
        """Show what goes on and keep how long it took, in seconds."""
        self.progress.stage(name, hint)
        started = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started
