"""`paravt ask VIDEO "QUESTION"`: one episode, shown turn by turn as it happens, and as a page on request."""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

import tool_workers
from paravt_ray.chat import Chat
from paravt_ray.cluster import connected
from paravt_ray.config import Config, model_directory
from paravt_ray.episode import Episode, Frame, Sample
from paravt_ray.errors import InputError, UserError
from paravt_ray.evaluation.page import episode_page
from paravt_ray.evaluation.show import Narrator, clock, outcome, printable
from paravt_ray.placement import has_gpus
from paravt_ray.rollout.agent import Observer, run_group
from paravt_ray.rollout.engine import EngineError, Generation, Sampling
from paravt_ray.rollout.frames import crop_pool
from paravt_ray.rollout.generator import Generator, actor_options, log_file, log_tail
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.tracking.logs import log_to_file
from tool_workers import ToolError, VideoInfo

SHUTDOWN_TIMEOUT_S = 30.0


class AskError(UserError):
    """The question got no episode; the message says why."""


def run(config: Config, video: str, question: str, save: str | Path | None = None) -> int:
    """Ask one question, print the turns as they happen, and write the page to `save` if that is given.

    Returns:
        0 if there is an answer, 1 if the model gave none.

    Raises:
        InputError: the video cannot be read, the question is empty, or `save` cannot be written.
        AskError: the engine could not be started or failed.
    """
    path, info = _video(video)
    if not question.strip():
        raise InputError("The question is empty.")
    page = _page_file(save)
    config = copy.deepcopy(config)
    config.model.path = str(model_directory(config))
    config.tools.workers = 1
    clip = (info.start_time, info.end_time)
    print(f"{printable(path.name)}: {clock(clip[0])} to {clock(clip[1])}, {info.width}x{info.height}, {info.codec}")
    print(f"Question: {printable(question)}")
    sample = Sample("ask", question, (str(path),), answer="", question_type="oe")
    spec = GroupSpec("ask", sample, config.rollout.overview_frames, 1, temperature=0.0, seed=config.trainer.seed)
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="paravt-ask-")))
        log_to_file(logs)
        stack.enter_context(connected(config, logs))
        episode = _episode(config, spec, logs, Narrator(clip, config.rollout.think_prefix))
    print(f"\nAnswer: {outcome(episode)}")
    if page is not None:
        page.write_text(episode_page(episode, clip), encoding="utf-8")
        print(f"The page is in {page}.")
    return 0 if episode.answer is not None else 1


class _AskGenerator(Generator):
    """A generator whose engine is driven from outside, so that turns can be shown as they happen."""

    async def generate(self, prompt_ids: Sequence[int], frames: Sequence[Frame], sampling: Sampling) -> Generation:
        """Sample one turn."""
        return await self._running.generate(prompt_ids, frames, sampling)


class _RemoteEngine:
    """The engine of a generator actor. The agent loop puts a deadline on every turn."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    async def generate(self, prompt_ids: Sequence[int], frames: Sequence[Frame], sampling: Sampling) -> Generation:
        """See `Engine.generate`."""
        try:
            generation: Generation = await self._generator.generate.remote(list(prompt_ids), list(frames), sampling)
        except RayActorError as error:
            raise EngineError(f"The generator died: {error}") from error
        return generation


def _episode(config: Config, spec: GroupSpec, logs: Path, observer: Observer) -> Episode:
    """Start what an episode needs, run it, and end everything again."""
    chat = Chat.from_pretrained(config.model.path, config.model.frames_as)
    with ExitStack() as stack:
        pool = crop_pool(config, chat.patch_factor)
        stack.callback(pool.close)
        actor = ray.remote(_AskGenerator).options(**actor_options(config, has_gpus()))
        generator = actor.remote(config, 0, pool, str(logs))
        stack.callback(_end, generator)
        print("Starting the model (half a minute for a small one, minutes for a large one) ...", flush=True)
        try:
            ray.get(generator.ready.remote(), timeout=config.rollout.start_timeout_s)
        except GetTimeoutError as error:
            limit = f"rollout.start_timeout_s={config.rollout.start_timeout_s:g} s"
            raise AskError(f"The engine did not start within {limit}. Its log ends:\n{_log_end(logs)}") from error
        except RayActorError as error:
            raise AskError(f"The engine's process died while it started. Its log ends:\n{_log_end(logs)}") from error
        group = asyncio.run(run_group(_RemoteEngine(generator), pool, chat, config, spec, observer=observer))
    if not group.episodes:
        raise AskError(f"The question could not be asked: {group.failures[0].split(': ', 1)[1]}")
    return group.episodes[0]


def _end(generator: Any) -> None:
    """End the engine in order, or at once where it does not answer."""
    try:
        ray.get(generator.shutdown.remote(), timeout=SHUTDOWN_TIMEOUT_S)
    except (GetTimeoutError, RayActorError):
        ray.kill(generator)


def _log_end(logs: Path) -> str:
    return log_tail(log_file(logs, 0))


def _video(video: str) -> tuple[Path, VideoInfo]:
    """The video's absolute path and what it is, looked at before anything slow is started."""
    path = Path(video).expanduser().absolute()
    try:
        return path, tool_workers.probe(path)
    except ToolError as error:
        raise InputError(f"{video} cannot be asked about: {error}") from error


def _page_file(save: str | Path | None) -> Path | None:
    """Where the page goes; refused before the wait, not after it."""
    if not save:
        return None
    page = Path(save).expanduser()
    if page.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--save writes a page: give it a name that ends in .html, not {save}.")
    if not page.absolute().parent.is_dir():
        raise InputError(f"There is no folder {page.absolute().parent} for {page.name}.")
    return page
