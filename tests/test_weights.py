"""Publishing weights, describing them, and comparing what generator and learner say of the same tokens."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from tiny import make_tiny_checkpoint, make_tokenizer

from paravt_ray.chat import Chat
from paravt_ray.config import Config
from paravt_ray.episode import Trajectory
from paravt_ray.rollout.canary import CanaryError, CanaryRun, canary_prompt, canary_row, check_canary, check_successor
from paravt_ray.weights.fetch import local_bytes, read_chunk
from paravt_ray.weights.manifest import check_shapes, checkpoint_shapes
from paravt_ray.weights.push import Push, WeightError
from paravt_ray.weights.send import publish, unpublish


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    unpublish()
    links = [str(file.readlink()) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    assert not [link for link in links if "paravt-weights" in link]


def read(push: Push) -> dict[str, torch.Tensor]:
    data = Path(push.path).read_bytes()
    assert len(data) == push.nbytes and xxhash.xxh3_64_hexdigest(data) == push.digest
    return {
        entry.name: torch.frombuffer(
            bytearray(data), dtype=getattr(torch, entry.dtype), count=int(np.prod(entry.shape)), offset=entry.offset
        ).view(entry.shape)
        for entry in push.tensors
    }


def test_what_is_published_is_what_was_given() -> None:
    tensors = {
        "odd": torch.arange(7, dtype=torch.bfloat16),  # 14 bytes: the next one must still be aligned
        "turned": torch.arange(12, dtype=torch.float32).view(3, 4).T,
        "trained": torch.nn.Parameter(torch.randn(2, 3)),
        "scalar": torch.tensor(3.0),
    }
    push = publish(tensors.items(), 5)
    assert push.version == 5
    found = read(push)
    assert list(found) == list(tensors)
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )


def test_published_bytes_cannot_be_changed() -> None:
    push = publish([("a", torch.zeros(3))], 1)
    with pytest.raises(PermissionError), Path(push.path).open("r+b", buffering=0) as stream:
        stream.write(b"x")


def test_a_new_version_takes_the_place_of_the_old_but_not_under_its_readers() -> None:
    old = publish([("a", torch.zeros(3))], 1)
    with Path(old.path).open("rb") as reader:
        new = publish([("a", torch.ones(3))], 2)
        assert reader.read() == bytes(12)
    assert torch.equal(read(new)["a"], torch.ones(3))
    unpublish()
    assert not Path(new.path).exists()


def test_a_publication_that_fails_leaves_nothing() -> None:
    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", torch.zeros(3)
        raise ValueError("gathering failed")

    with pytest.raises(ValueError, match="gathering failed"):
        publish(tensors(), 1)
    for bad in ([], [("a", torch.zeros(1)), ("a", torch.zeros(1))]):
        with pytest.raises(WeightError, match="no tensors, or one of its names comes twice"):
            publish(bad, 1)


def test_memory_that_does_not_suffice_is_one_sentence() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(WeightError, match="free memory for one whole copy of the model"):
            publish([("a", torch.zeros(1 << 20))], 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_publishers_node_reads_in_place() -> None:
    push = publish([("a", torch.zeros(3))], 1)

    async def path() -> str:
        async with local_bytes(push, 1.0) as found:
            return found

    assert asyncio.run(path()) == push.path
    assert read_chunk(push.path, 4, 100).nbytes == 8


def test_a_checkpoints_tensors_are_those_of_the_model(tmp_path: Path) -> None:
    from transformers import Qwen3VLForConditionalGeneration

    make_tiny_checkpoint(tmp_path)
    model = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    check_shapes(checkpoint_shapes(tmp_path), shapes)
    with pytest.raises(WeightError, match=r"holds no \*.safetensors"):
        checkpoint_shapes(tmp_path / "elsewhere")


def test_every_difference_of_names_and_shapes_is_named() -> None:
    expected = {"model.visual.a": (2, 3), "lm_head.weight": (4,), "b": (1,)}
    check_shapes(expected, dict(expected))
    with pytest.raises(WeightError, match=r"missing: model\.visual\.a; unknown: visual\.a"):
        check_shapes(expected, {"visual.a": (2, 3), "lm_head.weight": (4,), "b": (1,)})
    with pytest.raises(WeightError, match=r"of another shape: b \(\(0,\) instead of \(1,\)\)"):
        check_shapes(expected, expected | {"b": (0,)})  # what an ungathered ZeRO-3 parameter looks like


# ---- the canary ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(make_tokenizer(["what is in this picture"]), patch_factor=32)


def make_run(chat: Chat, version: int = 4) -> CanaryRun:
    prompt = canary_prompt(chat, Config())
    run = CanaryRun(Trajectory(), version)
    run.trajectory.append_prompt(chat.expand(prompt.ids, prompt.frames), prompt.ids, prompt.frames)
    run.trajectory.append_generated([5, 6, 7], [-1.0, -2.0, -0.5], version)
    return run


@pytest.mark.parametrize(("largest", "side"), [(50176, 128), (5000, 64), (1024, 32)])
def test_the_canarys_frame_keeps_the_pixel_limits(chat: Chat, largest: int, side: int) -> None:
    config = Config()
    config.model.crop_max_pixels = largest
    (frame,) = canary_prompt(chat, config).frames
    assert frame.pixels.shape == (side, side, 3)
    assert len(np.unique(frame.pixels.reshape(-1, 3), axis=0)) == side * side


def test_the_canarys_frame_is_shown_as_those_of_the_run(chat: Chat) -> None:
    pads = []
    for frames_as in ("images", "video"):
        ids = canary_prompt(Chat(chat.tokenizer, 32, frames_as), Config()).ids
        pads.append((ids.count(chat.image_pad), ids.count(chat.video_pad)))
    assert pads == [(1, 0), (0, 1)]


def test_a_canary_passes_within_the_tolerance_and_reports_the_gap(chat: Chat) -> None:
    run = make_run(chat)
    row = canary_row(run)
    learner = row.behaviour_logprobs + np.float32(5e-5) * row.generated
    assert check_canary([run], [learner], 4, "float32") == pytest.approx(5e-5, rel=0.01)


@pytest.mark.parametrize("difference", [2e-4, np.nan, np.inf])
def test_a_canary_fails_beyond_it(chat: Chat, difference: float) -> None:
    run = make_run(chat)
    learner = canary_row(run).behaviour_logprobs.copy()
    learner[-1] += difference
    with pytest.raises(CanaryError, match=r"Generator 0 does not hold the learner's weights"):
        check_canary([run], [learner], 4, "float32")


def test_a_canary_of_another_version_fails(chat: Chat) -> None:
    run = make_run(chat, version=3)
    with pytest.raises(CanaryError, match="version 3 of the weights after version 4"):
        check_canary([run], [canary_row(run).behaviour_logprobs], 4, "float32")


def sampled(logprob: float, ids: Sequence[int] = (5, 6)) -> CanaryRun:
    trajectory = Trajectory()
    trajectory.append_prompt([1, 2], [1, 2], [])
    trajectory.append_generated(list(ids), [logprob] * len(ids), 1)
    return CanaryRun(trajectory, 1)


@pytest.mark.parametrize(
    ("mine", "theirs", "passes"),
    [
        (sampled(-1.0), sampled(-1.00005), True),
        (sampled(-1.0), sampled(-1.001), False),
        (sampled(-1.0, [5, 6]), sampled(-1.0, [5, 7]), True),  # as far as they sampled the same
        (sampled(-1.0, [4, 6]), sampled(-1.0, [5, 6]), False),
        (sampled(-1.0), sampled(float("nan")), False),
    ],
)
def test_successors_repeat_the_canary(mine: CanaryRun, theirs: CanaryRun, passes: bool) -> None:
    with nullcontext() if passes else pytest.raises(CanaryError):
        check_successor(mine, theirs, "float32")
