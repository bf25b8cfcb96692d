"""The supervised cold start: conversations -> rows -> optimizer steps -> a checkpoint that RL starts from."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path

from paravt_ray.chat import Chat
from paravt_ray.cluster import connected
from paravt_ray.config import Config, model_directory
from paravt_ray.episode import TrainRow
from paravt_ray.errors import InputError
from paravt_ray.learner import checkpoint
from paravt_ray.learner.actor import LearnerGroup, free_port
from paravt_ray.learner.engine import denormals_flushed
from paravt_ray.learner.learner import Learner
from paravt_ray.learner.resume import Origin, check_resume
from paravt_ray.learner.schedule import LrSchedule
from paravt_ray.rollout.gating import stable_hash
from paravt_ray.sft.conversations import Conversation, Skipped, SkippedRowError, read_conversations
from paravt_ray.sft.display import Display
from paravt_ray.sft.examples import ExampleBuilder, FrameSource
from paravt_ray.tracking.run_dir import RunDir, RunDirError

AHEAD = 2
"""Batches that are prepared while one is trained on."""

AnyLearner = Learner | LearnerGroup


class Batches:
    """A data set as batches of rows; the next ones are prepared in the background."""

    def __init__(
        self, conversations: Sequence[Conversation], skipped: Skipped, builder: ExampleBuilder, config: Config
    ) -> None:
        """`skipped` counts the rows that turn out to be unusable."""
        self._conversations, self._skipped, self._builder, self._config = conversations, skipped, builder, config
        self._orders: dict[int, list[int]] = {}
        self._pool = ThreadPoolExecutor(config.tools.workers, thread_name_prefix="examples")

    def steps(self, first: int, last: int) -> Iterator[list[TrainRow]]:
        """The batches of optimizer steps `first` to `last - 1`, in an order that follows from the seed."""
        return self._prepared(self._chosen(step) for step in range(first, last))

    def once(self) -> Iterator[list[TrainRow]]:
        """Every conversation once, with the frame budget of epoch 0."""
        size = self._config.sft.batch_size
        starts = range(0, len(self._conversations), size)
        return self._prepared([(c, 0) for c in self._conversations[start : start + size]] for start in starts)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _chosen(self, step: int) -> list[tuple[Conversation, int]]:
        count, size = len(self._conversations), self._config.sft.batch_size
        places = (divmod(position, count) for position in range(step * size, (step + 1) * size))
        return [(self._conversations[self._order(epoch)[index]], epoch) for epoch, index in places]

    def _order(self, epoch: int) -> list[int]:
        """Each epoch's own order, the same on every machine and after every restart."""
        if epoch not in self._orders:
            seed, ids = self._config.trainer.seed, [c.row_id for c in self._conversations]
            order = sorted(range(len(ids)), key=lambda i: stable_hash("sft", seed, epoch, ids[i], i))
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1} | {epoch: order}
        return self._orders[epoch]

    def _prepared(self, batches: Iterable[list[tuple[Conversation, int]]]) -> Iterator[list[TrainRow]]:
        waiting: deque[list[tuple[str, Future[TrainRow]]]] = deque()
        for batch in batches:
            waiting.append([(c.row_id, self._pool.submit(self._builder.build, c, epoch)) for c, epoch in batch])
            if len(waiting) > AHEAD:
                yield self._collect(waiting.popleft())
        while waiting:
            yield self._collect(waiting.popleft())

    def _collect(self, batch: list[tuple[str, Future[TrainRow]]]) -> list[TrainRow]:
        rows = []
        for row_id, future in batch:
            try:
                rows.append(future.result(self._config.learner.timeout_s))
            except SkippedRowError as error:
                self._skipped.add(row_id, error)
        return rows


def train(config: Config) -> Path:
    """Train, write checkpoints and metrics to `sft.output`, and leave the trained model there in Hugging Face format.

    Raises:
        InputError: the configuration or the data cannot be used, or the run cannot go on from its newest checkpoint.
    """
    if not config.data.train:
        raise InputError("data.train is empty: name a parquet file with conversations.")
    source = model_directory(config)
    print(f"Reading the files of {source}: checkpoints keep their digest (a minute for a large model).")
    conversations, skipped = _read(config, config.data.train)
    steps = config.sft.steps or -(-len(conversations) * config.sft.epochs // config.sft.batch_size)
    schedule = LrSchedule.from_config(config.learner, steps)
    origin = Origin.of(config, source, (c.content() for c in conversations), "sft.batch_size")
    with ExitStack() as stack:
        run = stack.enter_context(_run_dir(config))
        resume = check_resume(run.checkpoints, origin, schedule)
        first = resume.step if resume else 0
        display = Display(first, steps)
        display.say(f"{len(conversations)} conversations, {steps} steps; {schedule.describe()}.")
        if first:
            display.say(f"Going on after step {first}.")
        chat = Chat.from_pretrained(source, config.model.frames_as)
        frames = stack.enter_context(closing(FrameSource(config, chat.patch_factor)))
        builder = ExampleBuilder(chat, frames, config)
        batches = stack.enter_context(closing(Batches(conversations, skipped, builder, config)))
        held_out = None
        if config.data.valid:
            chosen, held_out_skipped = _read(config, config.data.valid)
            chosen = chosen[: config.trainer.eval_samples or None]
            held_out = stack.enter_context(closing(Batches(chosen, held_out_skipped, builder, config)))
        learner = stack.enter_context(
            _open_learner(config, source, schedule, resume.checkpoint if resume else None, run.logs)
        )
        run.rewind(first if resume else -1)  # all that can be refused has been: until here the run is as it was
        stack.enter_context(display)
        _loop(config, learner, run, origin, display, batches.steps(first, steps), held_out, range(first + 1, steps + 1))
        checkpoint.replace_model(run.path, learner.save_model)
        if skipped.ids:
            display.say(skipped.sentence())
    return run.path


def _run_dir(config: Config) -> RunDir:
    try:
        return RunDir(replace(config, trainer=replace(config.trainer, run_dir=config.sft.output)))
    except RunDirError as error:
        raise RunDirError(str(error).replace("trainer.run_dir", "sft.output")) from None


def _read(config: Config, parquet: str) -> tuple[list[Conversation], Skipped]:
    return read_conversations(Path(parquet), config.data.video_root, config.sft.max_skipped)


@contextmanager
def _open_learner(
    config: Config, source: Path, schedule: LrSchedule, resume: Path | None, logs: Path
) -> Iterator[AnyLearner]:
    """One rank learns in this process, which starts faster; several are Ray actors."""
    if config.learner.ranks == 1:
        address = f"tcp://127.0.0.1:{free_port()}"
        with (
            denormals_flushed(),
            closing(Learner(config, source, schedule, rendezvous=address, resume=resume)) as learner,
        ):
            yield learner
    else:
        with connected(config, logs), LearnerGroup(config, source, supervised=schedule, resume=resume) as group:
            yield group


def _loop(
    config: Config,
    learner: AnyLearner,
    run: RunDir,
    origin: Origin,
    display: Display,
    batches: Iterator[list[TrainRow]],
    held_out: Batches | None,
    steps: range,
) -> None:
    """All optimizer steps, with what goes with them: held-out loss, metrics, checkpoints."""

    def due(every: int, step: int) -> bool:
        return step == steps[-1] or (every > 0 and step % every == 0)

    if held_out and steps and steps[0] == 1:
        run.log_metrics(0, {"valid/loss": _held_out_loss(learner, held_out)})
    for step, rows in zip(steps, batches, strict=True):
        started = time.perf_counter()
        metrics = learner.fit(rows) if rows else {}
        if held_out and due(config.trainer.eval_every, step):
            metrics["valid/loss"] = _held_out_loss(learner, held_out)
        metrics["time/step"] = time.perf_counter() - started
        run.log_metrics(step, metrics)
        display.step(step, metrics)
        if due(config.trainer.save_every, step):
            learner.save(run.checkpoint(step), origin.state(step), config.trainer.keep_checkpoints)


def _held_out_loss(learner: AnyLearner, held_out: Batches) -> float:
    total, tokens = 0.0, 0
    for rows in held_out.once():
        loss, count = learner.cross_entropy(rows)
        total, tokens = total + loss, tokens + count
    return total / max(1, tokens)
