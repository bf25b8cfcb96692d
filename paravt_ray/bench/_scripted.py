"""A generator whose model says what it is told to, at the full price: turns of known text, whatever the weights.

Everything is real but the words. The engine gets the real prompt with its frames and really samples as many tokens as
the script's turn has; then the script's tokens take the place of the sampled ones. Agent loop, parser, crops,
sub-agents, weights and canary are those of any run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paravt_ray.bench._workload import call_text, words
from paravt_ray.chat import SUBAGENT_SYSTEM, Chat, Message
from paravt_ray.config import Config
from paravt_ray.episode import Frame, Group
from paravt_ray.placement import has_gpus
from paravt_ray.rollout.agent import run_group
from paravt_ray.rollout.engine import EngineError, Generation, Sampling
from paravt_ray.rollout.generator import Generator, actor_options, log_file
from paravt_ray.rollout.handle import RayGenerator
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.rollout.vllm_engine import VllmEngine, prompt, sampling_params
from tool_workers.pool import CropPool


@dataclass(frozen=True)
class Script:
    """What the model says, as it follows the forced think prefix; the end-of-turn token is added."""

    turns: tuple[str, ...]
    """Of the main agent, one after the other."""
    summary: str
    """Of every sub-agent."""


def script_of(
    chat: Chat, windows: Sequence[tuple[int, int]], *, think_tokens: int, summary_tokens: int, per_turn: int
) -> Script:
    """A script with one call for each window, `per_turn` of them in each turn, and then an answer.

    Args:
        chat: of the model.
        windows: in seconds.
        think_tokens: thinking in every turn.
        summary_tokens: of a sub-agent.
        per_turn: calls of one turn.
    """
    think = f"{words(chat, think_tokens)}\n</think>\n"
    cuts = range(0, len(windows), per_turn)
    calls = ["\n".join(call_text(window) for window in windows[cut : cut + per_turn]) for cut in cuts]
    return Script((*(think + call for call in calls), f"{think}<answer>A</answer>"), words(chat, summary_tokens))


class ScriptedEngine:
    """The engine as the agent loop sees it."""

    def __init__(self, engine: VllmEngine, chat: Chat, config: Config, script: Script) -> None:
        """`engine` does the work."""
        self._engine, self._chat, self._script = engine, chat, script
        self._subagent = chat.render([Message("system", (SUBAGENT_SYSTEM,))]).ids
        self._number = 0

    async def generate(self, prompt_ids: Sequence[int], frames: Sequence[Frame], sampling: Sampling) -> Generation:
        """See `Engine.generate`."""
        ids = [*self._chat.tokenizer.encode(self._text(prompt_ids), add_special_tokens=False), self._chat.im_end]
        if len(ids) > sampling.max_new_tokens:
            raise EngineError(f"The script has a turn of {len(ids)} tokens, {sampling.max_new_tokens} are allowed.")
        expanded, logprobs = await self._sample(list(prompt_ids), frames, sampling, len(ids))
        return Generation(expanded, ids, logprobs, "stop", self._engine.version)

    def _text(self, prompt_ids: Sequence[int]) -> str:
        if list(prompt_ids[: len(self._subagent)]) == self._subagent:
            return self._script.summary
        # System, user, assistant at first; each turn adds an assistant's and a user's.
        turn = (list(prompt_ids).count(self._chat.im_start) - 3) // 2
        return self._script.turns[turn]

    async def _sample(
        self, prompt_ids: list[int], frames: Sequence[Frame], sampling: Sampling, tokens: int
    ) -> tuple[list[int], list[float]]:
        """Sample that many tokens; returns the expanded prompt and the sampled tokens' log-probs."""
        params = sampling_params(sampling.temperature, tokens, sampling.seed)
        self._number += 1
        pictures = self._chat.pictures(prompt_ids, frames)
        outputs = self._engine._llm.generate(prompt(prompt_ids, pictures), params, f"script-{id(self)}-{self._number}")
        (output,) = [latest async for latest in outputs]
        (completion,) = output.outputs
        sampled = zip(completion.token_ids, completion.logprobs, strict=True)
        return list(output.prompt_token_ids), [entry[token].logprob for token, entry in sampled]


class ScriptedGenerator(Generator):
    """The generator's actor."""

    def __init__(self, config: Config, index: int, pool: CropPool, log_dir: str, script: Script) -> None:
        """`script` is for `rollout_group`; the rest is `Generator`'s."""
        super().__init__(config, index, pool, log_dir)
        self._script = script

    async def rollout_group(self, spec: GroupSpec) -> Group:
        """Roll out one prompt by the script."""
        return await self.act(spec, self._script)

    async def act(self, spec: GroupSpec, script: Script) -> Group:
        """Roll out one prompt by another script."""
        engine = ScriptedEngine(self._running, self._chat, self._config, script)
        return await run_group(engine, self._pool, self._chat, self._config, spec)


def start_scripted(config: Config, index: int, pool: CropPool, log_dir: Path, script: Script) -> Any:
    """Start the actor; its `ready` starts the engine."""
    import ray

    actor = ray.remote(ScriptedGenerator).options(**actor_options(config, has_gpus()))
    return actor.remote(config, index, pool, str(log_dir), script)


class ScriptedHandle(RayGenerator):
    """The actor as the fleet sees it."""

    def __init__(self, config: Config, index: int, pool: CropPool, log_dir: Path, script: Script) -> None:
        """Start the actor."""
        self._index, self._log = index, log_file(log_dir, index)
        self._actor = start_scripted(config, index, pool, log_dir, script)
