"""The other side of `paravt bench step`: TRL's GRPOTrainer on the same model, prompts and turns.

TRL generates with transformers here, as it does where no vLLM server is set up. What it does by default and we do not
(recomputing activations, bfloat16) is switched off.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoProcessor, Qwen3VLForConditionalGeneration, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from paravt_ray.chat import MAIN_SYSTEM, Chat, frames_reply, question_text
from paravt_ray.config import Config
from paravt_ray.episode import Sample
from tool_workers import crop, overview
from tool_workers.records import Crop

CHAT_TEMPLATE = """\
{%- macro written(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n' if loop.first or loop.previtem.role != 'tool' else '\\n' -}}
{{- '<tool_response>\\n' + written(message.content) + '\\n</tool_response>' -}}
{{- '<|im_end|>\\n' if loop.last or loop.nextitem.role != 'tool' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + written(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{{- '<|im_start|>assistant\\n<think>\\n' if add_generation_prompt -}}
"""
"""Writes what our own renderer writes, tool replies included."""


@dataclass(frozen=True)
class Step:
    """One measured step."""

    seconds: float
    new_tokens: int
    """Of all completions, tool replies included."""


class SingleTurns:
    """Text in, one turn out."""

    def __init__(self, config: Config, folder: Path, prompts: Sequence[str]) -> None:
        """Load the model.

        Args:
            config: our side's.
            folder: for what TRL writes.
            prompts: rendered.
        """
        chat = Chat.from_pretrained(config.model.path)
        chat.tokenizer.padding_side = "left"
        self._clock = _Clock()
        self._trainer = GRPOTrainer(
            _load(config),
            self._clock.reward,
            _arguments(
                config,
                folder,
                max_completion_length=config.rollout.max_new_tokens,
                # A pad that stands for no image would be sampled now and then.
                generation_kwargs={"suppress_tokens": list(chat.vision_ids)},
            ),
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
            processing_class=chat.tokenizer,
            callbacks=[self._clock],
        )

    def step(self) -> Step:
        """Generate, score, train once."""
        return self._clock.time(self._trainer)


class ToolTurns:
    """A turn with calls of a crop tool whose frames come back, then an answer, in scripted words."""

    def __init__(self, config: Config, folder: Path, samples: Sequence[Sample], turns: Sequence[str]) -> None:
        """Load the model and decode the overviews.

        Args:
            config: our side's.
            folder: for what TRL writes.
            samples: each with one video.
            turns: what the model says after the think prefix; calls name the video `0.mp4`.
        """
        processor = AutoProcessor.from_pretrained(config.model.path, padding_side="left", local_files_only=True)
        processor.chat_template = CHAT_TEMPLATE
        processor.tokenizer.response_template = qwen3_template
        encode = processor.tokenizer.encode
        reader = _Reader(config, samples)
        self._clock = _Clock()
        self._trainer = _ScriptedTrainer(
            _load(config),
            self._clock.reward,
            # In TRL, what the tools return counts too.
            _arguments(config, folder, max_completion_length=config.model.context_length // 2),
            train_dataset=Dataset.from_list([reader.row(sample) for sample in samples]),
            processing_class=processor,
            callbacks=[self._clock],
            tools=[reader.tool()],
        )
        self._trainer.script = [
            [encode(f"{turn.replace('0.mp4', Path(sample.videos[0]).name)}<|im_end|>") for turn in turns]
            for sample in samples
            for _ in range(config.rollout.group_size)
        ]

    def step(self) -> Step:
        """Generate, call, generate, score, train once.

        Raises:
            RuntimeError: the scripted turns were not all taken, or a tool call failed.
        """
        step = self._clock.time(self._trainer)
        turns, failed = len(self._trainer.script[0]), self._trainer.failed
        if self._trainer.turn != turns or failed:
            raise RuntimeError(
                f"TRL took {self._trainer.turn} of {turns} turns; {failed:.0%} of the tool calls failed."
            )
        return step


class _ScriptedTrainer(GRPOTrainer):  # type: ignore[misc]
    """Really samples as many tokens as the script's turn has, then puts the script's in their place."""

    script: list[list[list[int]]]
    """[samples][turns] token ids."""
    turn = 0
    failed = 0.0
    """Share of the last step's tool calls that failed."""

    def _generate(self, prompts: Any) -> Any:
        self.turn = 0
        generated = super()._generate(prompts)
        self.failed = self._metrics["train"]["tools/failure_frequency"][-1]  # gone once the step is logged
        return generated

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        ids = [turns[self.turn] for turns in self.script]
        self.turn += 1
        longest = max(map(len, ids))
        self.generation_config.max_new_tokens = self.generation_config.min_new_tokens = longest
        super()._generate_single_turn(prompt_ids, *args, **kwargs)
        return [list(turn) for turn in ids], None


class _Reader:
    """The videos as TRL sees them: overviews in the prompts, crops through a tool that is an ordinary function."""

    def __init__(self, config: Config, samples: Sequence[Sample]) -> None:
        self._videos = {Path(video).name: video for sample in samples for video in sample.videos}
        self._config = config

    def row(self, sample: Sample) -> dict[str, Any]:
        """One line of the data set."""
        (video,) = sample.videos
        config = self._config
        shown = overview(video, config.rollout.overview_frames, max_pixels=config.model.overview_max_pixels)
        # The pictures go into a column of their own; the blocks keep their places.
        blocks = [{key: value for key, value in block.items() if key != "image"} for block in _blocks(shown)]
        text = {"type": "text", "text": f"\n{question_text(sample.question, sample.videos)}"}
        system = {"role": "system", "content": [{"type": "text", "text": MAIN_SYSTEM}]}
        return {
            "prompt": [system, {"role": "user", "content": [*blocks, text]}],
            "images": [Image.fromarray(pixels) for pixels in shown.frames],
        }

    def tool(self) -> Any:
        """The tool."""
        tools, max_pixels = self._config.tools, self._config.model.crop_max_pixels

        def crop_video(video_path: str, start_time: float, end_time: float) -> list[dict[str, Any]]:
            """Look closely at a part of the video.

            Args:
                video_path: The video.
                start_time: In seconds.
                end_time: In seconds.

            Returns:
                The frames.
            """
            found = crop(
                self._videos[video_path],
                start_time,
                end_time,
                fps=tools.crop_fps,
                max_frames=tools.crop_max_frames,
                max_pixels=max_pixels,
            )
            return [{"type": "text", "text": frames_reply((start_time, end_time))}, *_blocks(found)]

        return crop_video


def _blocks(frames: Crop) -> list[dict[str, Any]]:
    """Each frame after its time, as in our prompts."""
    blocks: list[dict[str, Any]] = []
    for pixels, time_s in zip(frames.frames, frames.timestamps.tolist(), strict=True):
        blocks.append({"type": "text", "text": f"<{time_s:.1f} seconds>"})
        blocks.append({"type": "image", "image": Image.fromarray(pixels)})
    return blocks


class _Clock(TrainerCallback):  # type: ignore[misc]
    """Times one step inside `train`, and is its reward."""

    def __init__(self) -> None:
        self._began = self._seconds = 0.0
        self._tokens = 0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock: nothing is generated yet."""
        self._began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Stop it: the optimizer has made its step."""
        self._seconds = time.perf_counter() - self._began

    def reward(self, completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """Something that differs within a group."""
        self._tokens = sum(map(len, completion_ids))
        return [float(number % 2) for number in range(len(completion_ids))]

    def time(self, trainer: Any) -> Step:
        """Train for one step; setting up and tearing down of `train` is not charged."""
        trainer.train()
        return Step(self._seconds, self._tokens)


def _load(config: Config) -> Any:
    return Qwen3VLForConditionalGeneration.from_pretrained(
        config.model.path, dtype=torch.float32, local_files_only=True
    )


def _arguments(config: Config, folder: Path, **more: Any) -> Any:
    """TRL's settings for what our configuration says."""
    rollout = config.rollout
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rollout.prompts_per_step * rollout.group_size,
        num_generations=rollout.group_size,
        max_tool_calling_iterations=rollout.max_tool_turns,
        temperature=rollout.temperature,
        beta=config.algorithm.kl_coefficient,
        learning_rate=config.learner.lr,
        max_steps=1,
        shuffle_dataset=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **more,
    )
