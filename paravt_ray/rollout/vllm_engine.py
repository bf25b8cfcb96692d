"""vLLM behind the `Engine` protocol: ids and frames in, sampled ids with log-probs out; weights swapped in place."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paravt_ray.chat import FRAMES_PER_VIDEO_PAD, Chat, Picture
from paravt_ray.config import Config, model_directory
from paravt_ray.episode import Frame
from paravt_ray.rollout.engine import EngineError, Generation, Sampling
from paravt_ray.weights.push import BACKEND, Push, WeightError

INITIAL_VERSION = 0
"""Version of the weights that are read from the checkpoint at start."""
MAX_SEQUENCES = 256
"""Sequences that the engine works on at the same time; more wait inside it."""
_SHUTDOWN_S = 0.5
_REJECTIONS = 32
"""Vision ids that may be sampled in one turn before it is given up."""


@dataclass(frozen=True)
class _Piece:
    """What one request to vLLM returned."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    version: int


class VllmEngine:
    """One vLLM engine. Its process dies with this one.

    Log-probs are those of softmax(logits / temperature) over the whole vocabulary, as the learner computes them. Ids
    of the vision vocabulary are therefore not masked out, which would change every other log-prob; one that is
    sampled is rejected, and sampling goes on from there with another seed.
    """

    def __init__(self, config: Config, chat: Chat, llm: Any) -> None:
        """Use `start`; `llm` is a running `AsyncLLM`."""
        self._config, self._chat, self._llm = config, chat, llm
        self._numbers = count()
        self._running: set[str] = set()
        self._update = asyncio.Lock()
        self._fault = ""
        """Why the engine must not answer; empty where it may."""
        self._asleep = False
        self.version = INITIAL_VERSION

    @classmethod
    async def start(cls, config: Config, chat: Chat) -> VllmEngine:
        """Start the engine with the checkpoint in `config.model.path`; takes seconds to minutes.

        Raises:
            Exception: whatever vLLM raises; it has no common base.
        """
        from vllm.v1.engine.async_llm import AsyncLLM

        llm = AsyncLLM.from_engine_args(engine_args(config))
        await llm.update_weight_version(str(INITIAL_VERSION))
        return cls(config, chat, llm)

    async def generate(self, prompt_ids: Sequence[int], frames: Sequence[Frame], sampling: Sampling) -> Generation:
        """Sample one turn; see `Engine.generate`.

        Raises:
            EngineError: the engine failed or was aborted, or its output is not one whole sample.
        """
        try:
            pictures = self._chat.pictures(prompt_ids, frames)
        except ValueError as error:
            raise EngineError(str(error)) from error
        expanded = len(self._chat.expand(prompt_ids, frames))
        ids: list[int] = []
        logprobs: list[float] = []
        pieces: list[_Piece] = []
        for attempt in range(_REJECTIONS):
            shown = prompt([*prompt_ids, *ids], pictures)
            left, expected = sampling.max_new_tokens - len(ids), expanded + len(ids)
            piece = await self._sample(shown, expected, sampling.temperature, left, sampling.seed + attempt)
            pieces.append(piece)
            rejected = piece.token_ids[-1] in self._chat.vision_ids
            kept = len(piece.token_ids) - rejected
            ids += piece.token_ids[:kept]
            logprobs += piece.logprobs[:kept]
            if not rejected:
                version = min(piece.version for piece in pieces)
                return Generation(pieces[0].prompt_token_ids, ids, logprobs, piece.finish_reason, version)
        raise EngineError(f"The policy sampled {_REJECTIONS} vision tokens in one turn: it no longer writes text.")

    async def _sample(
        self, shown: dict[str, Any], expected: int, temperature: float, max_tokens: int, seed: int
    ) -> _Piece:
        """One request; its prompt should become `expected` tokens."""
        if self._fault or self._asleep:
            raise EngineError(self._fault or "The engine sleeps: vLLM would keep the request until it wakes.")
        params = sampling_params(temperature, max_tokens, seed, [self._chat.im_end, *self._chat.vision_ids])
        request = f"{next(self._numbers)}"
        self._running.add(request)
        output = None
        try:
            async for latest in self._llm.generate(shown, params, request):
                output = latest
        except Exception as error:  # vLLM's errors have no common base; the cause keeps the original
            raise EngineError(f"The engine failed on a request: {error or type(error).__name__}") from error
        finally:
            self._running.discard(request)
        return self._checked(output, expected)

    def _checked(self, output: Any, expected: int) -> _Piece:
        """Refuse everything that is not one whole, consistent sample."""
        completion = output.outputs[0] if output is not None and output.outputs else None
        if completion is None or not completion.token_ids or completion.finish_reason not in ("stop", "length"):
            reason = completion.finish_reason if completion is not None else "no output"
            raise EngineError(self._fault or f"The engine gave no usable output ({reason}).")
        expanded = list(output.prompt_token_ids)
        if len(expanded) != expected:
            raise EngineError(
                f"The engine made {len(expanded)} tokens of a prompt that has {expected}: it resized a frame. Frame "
                "sizes must be multiples of the patch factor and lie between model.min_pixels and the largest of "
                "model.overview_max_pixels and model.crop_max_pixels."
            )
        ids = list(completion.token_ids)
        logprobs = [entry[token].logprob for token, entry in zip(ids, completion.logprobs or [], strict=False)]
        versions = [int(span.version) for span in completion.weight_versions or []]
        return _Piece(expanded, ids, logprobs, completion.finish_reason, min(versions, default=self.version))

    async def update_weights(self, push: Push, path: str) -> int:
        """Load a pushed version; running turns are frozen, and go on with the new weights from recomputed states.

        An engine that sleeps wakes: its weights first, its KV cache last, so that loading has the room of the latter.

        Args:
            push: the version.
            path: where this node can open its bytes.

        Returns:
            The version that the engine now holds.

        Raises:
            WeightError: it could not be loaded. The engine refuses work until a later push has succeeded.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        timeout_s = self._config.rollout.push_timeout_s
        async with self._update:
            try:
                async with asyncio.timeout(timeout_s):
                    if self._asleep:
                        await self._llm.wake_up(["weights"])
                    # The caches of preprocessed frames stay: they do not depend on weights, and clearing them under
                    # running requests would leave vLLM's two copies of them out of step.
                    await self._llm.pause_generation(mode="keep", clear_cache=False)
                    await self._llm.start_weight_update()
                    await self._llm.update_weights(WeightTransferUpdateRequest(push.update_info(path)))
                    await self._llm.finish_weight_update(str(push.version))
                    # Old weights must never answer: neither from cached prefixes (the running turns' own included)
                    # nor from cached frame features.
                    await self._llm.reset_prefix_cache(reset_running_requests=True)
                    await self._llm.reset_encoder_cache()
                    if self._asleep:
                        await self._llm.wake_up(["kv_cache"])  # whoever is awake as a whole resumes
                    else:
                        await self._llm.resume_generation()
            except BaseException as error:  # a cancellation leaves the engine half-loaded just as an error does
                reason = f"no answer within {timeout_s:g} s" if isinstance(error, TimeoutError) else str(error)
                self._fault = f"The engine does not hold whole weights: loading version {push.version} failed. {reason}"
                await self._llm.abort(list(self._running))
                if isinstance(error, Exception):
                    raise WeightError(self._fault) from error
                raise
            self._fault, self._asleep = "", False
            self.version = push.version
        return self.version

    async def sleep(self) -> None:
        """Give up the GPU's memory: weights are kept in the CPU's, caches are dropped. On a CPU nothing is freed.

        Deadlines are the caller's, and so is it to end an engine that fails: nobody knows what it holds.
        """
        async with self._update:
            await self._llm.sleep(level=1)
            self._asleep = True

    async def wake(self) -> None:
        """Take the GPU's memory again, with the weights that were there and empty caches; see `sleep`."""
        async with self._update:
            await self._llm.wake_up()
            self._asleep = False

    async def check(self, timeout_s: float) -> None:
        """Ask the engine's process for a sign of life.

        Raises:
            TimeoutError: it did not answer in time; it may be busy.
            EngineError: it is dead, or does not hold whole weights.
        """
        try:
            async with asyncio.timeout(timeout_s):
                version = await self._llm.get_weight_version()
        except TimeoutError:
            raise
        except Exception as error:  # vLLM's errors have no common base; the cause keeps the original
            raise EngineError(f"The engine is dead: {error}") from error
        if self._fault:
            raise EngineError(self._fault)
        if int(version) != self.version and not self._update.locked():
            raise EngineError(f"The engine holds version {version} of the weights instead of {self.version}.")

    def shutdown(self) -> None:
        """End the engine's process. It has nothing to write, and does not end by itself: it is not given time to."""
        self._llm.shutdown(timeout=_SHUTDOWN_S)


def sampling_params(temperature: float, max_tokens: int, seed: int, stop: Sequence[int] = ()) -> Any:
    """vLLM's settings of one sample: ids with their log-probs, at most `max_tokens`, ended by nothing but `stop`."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        logprobs=0,
        stop_token_ids=[*stop],
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def prompt(prompt_ids: list[int], pictures: Sequence[Picture]) -> dict[str, Any]:
    """Un-expanded ids with what their pads stand for, as vLLM takes them."""
    from PIL import Image

    result: dict[str, Any] = {"prompt_token_ids": prompt_ids}
    images = [picture[0] for picture in pictures if len(picture) == 1]
    videos = [picture for picture in pictures if len(picture) > 1]
    data: dict[str, list[Any]] = {
        "image": [Image.fromarray(frame.pixels) for frame in images],
        "video": [*map(_video, videos)],
    }
    # Equal ones are preprocessed, encoded and cached once, and their pixels are never hashed.
    uuids = {"image": [frame.key for frame in images], "video": ["|".join(f.key for f in v) for v in videos]}
    if pictures:
        result["multi_modal_data"] = {kind: items for kind, items in data.items() if items}
        result["multi_modal_uuids"] = {kind: keys for kind, keys in uuids.items() if keys}
    return result


def _video(frames: Picture) -> tuple[NDArray[np.uint8], dict[str, Any]]:
    """The frames of one video pad as a video of its own.

    Qwen3-VL's vision tower and positions know nothing of a video but these groups, so that a video in pieces is the
    same tokens; and a piece that two crops share is cached once.
    """
    # vLLM writes index / rate as the time of a frame. At a rate of 1 the indices are the seconds, of any spacing.
    seconds = [frame.time_s for frame in frames]
    metadata = {"fps": 1.0, "frames_indices": seconds, "total_num_frames": len(frames), "do_sample_frames": False}
    return np.stack([frame.pixels for frame in frames]), metadata


def engine_args(config: Config) -> Any:
    """vLLM's arguments of an engine for the configuration."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    model, rollout = config.model, config.rollout
    largest = max(model.overview_max_pixels, model.crop_max_pixels)
    overview = max(rollout.overview_frames, *rollout.frame_budgets, *config.trainer.eval_budgets)
    crops = config.tools.crop_max_frames * (rollout.max_calls_per_episode if rollout.reply == "frames" else 0)
    most = max(overview + crops, config.tools.crop_max_frames)
    if current_platform.is_cpu():
        # Without compilation, in the engine's own process: a start takes seconds instead of minutes, and on a model
        # that a CPU can run the tokens per second are the same.
        device: dict[str, Any] = {
            # Whole prompts in one go: where vLLM cuts one, it winds a seeded generator back, which CPU generators
            # cannot do; the engine dies of it.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(model.context_length, 8192),
            "kv_cache_memory_bytes": int(rollout.kv_cache_gb * 2**30),
            "enforce_eager": True,
        }
    else:
        # Sleep mode takes memory from another allocator; on CPUs vLLM refuses the setting, though engines can sleep.
        colocate = config.cluster.colocate
        device = {"gpu_memory_utilization": rollout.gpu_memory_utilization, "enable_sleep_mode": colocate}
    return AsyncEngineArgs(
        model=str(model_directory(config)),
        dtype=model.dtype,
        max_model_len=model.context_length,
        max_num_seqs=MAX_SEQUENCES,
        tensor_parallel_size=rollout.tensor_parallel,
        distributed_executor_backend="uni" if rollout.tensor_parallel == 1 else "mp",
        logprobs_mode="processed_logprobs",
        generation_config="vllm",
        limit_mm_per_prompt={"image": most, "video": most},
        mm_processor_kwargs={
            "images_kwargs": {"size": {"shortest_edge": model.min_pixels, "longest_edge": largest}},
            # Nothing is resized; the size, of all frames of a video together, is what vLLM keeps memory for.
            "videos_kwargs": {
                "do_resize": False,
                "size": {
                    "shortest_edge": FRAMES_PER_VIDEO_PAD * model.min_pixels,
                    "longest_edge": FRAMES_PER_VIDEO_PAD * largest,
                },
            },
        },
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        seed=0,
        disable_log_stats=True,
        **device,
    )
