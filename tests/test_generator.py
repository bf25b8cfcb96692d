"""The generator with the real vLLM and the real weights path, against transformers as the reference.

One engine for most of it, in a Ray cluster of two nodes on this machine. Its cache holds about 4,000 tokens, so that
the concurrent test preempts; sequences are up to 1,024 long.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import scripted
import torch
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tiny import make_tiny_checkpoint

from paravt_ray.chat import Chat, Message, Reply, Video
from paravt_ray.config import Config
from paravt_ray.episode import Frame, TrainRow, Trajectory
from paravt_ray.learner.batching import Collator
from paravt_ray.learner.policy import Policy
from paravt_ray.rollout.canary import CanaryError, canary_row, check_canary
from paravt_ray.rollout.engine import EngineError, Generation, Sampling
from paravt_ray.rollout.fleet import FleetError, GeneratorFleet
from paravt_ray.rollout.generator import Generator, actor_options
from paravt_ray.weights.manifest import checkpoint_digest
from paravt_ray.weights.push import Adapter, Push, WeightError
from paravt_ray.weights.send import publish, unpublish

pytestmark = pytest.mark.slow

TEMPERATURE = 0.7
EXACT = 1e-5
"""Largest difference of log-probs that float32 explains (measured: 2e-6)."""


class Reference:
    """The same model in transformers: the learner's part."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoImageProcessor, Qwen3VLForConditionalGeneration

        self.model = Qwen3VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32).eval()
        self.processor = AutoImageProcessor.from_pretrained(path)
        self.image_pad = self.model.config.image_token_id

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        return list(self.model.named_parameters())

    def change(self, seed: int) -> None:
        """Move every parameter far enough for all log-probs to change."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                spread = parameter.std() if parameter.numel() > 1 else parameter.abs()
                parameter.add_(torch.randn_like(parameter) * (0.5 * spread + 1e-3))

    def logprobs(self, ids: Sequence[int], frames: Sequence[Frame]) -> np.ndarray:
        """[T] log-prob of each token but the first, which gets 0, at the sampling temperature."""
        inputs = torch.tensor([ids])
        seen = {}
        if frames:
            seen = self.processor(images=[f.pixels for f in frames], do_resize=False, return_tensors="pt")
        with torch.no_grad():
            kinds = (inputs == self.image_pad).int()
            logits = self.model(input_ids=inputs, mm_token_type_ids=kinds, **seen).logits[0]
        found = torch.log_softmax(logits[:-1] / TEMPERATURE, -1).gather(-1, inputs[0, 1:, None])[:, 0]
        return np.concatenate([[0.0], found.numpy()]).astype(np.float32)

    def gaps(self, generation: Generation, frames: Sequence[Frame]) -> np.ndarray:
        """[T] |generator - reference| of each sampled token."""
        whole = self.logprobs(generation.prompt_token_ids + generation.token_ids, frames)
        return np.abs(whole[len(generation.prompt_token_ids) :] - np.array(generation.logprobs, np.float32))


@dataclass
class Rig:
    """A running generator and what it is compared with."""

    actor: Any
    pid: int
    node_id: str
    config: Config
    chat: Chat
    reference: Reference
    version: int = 0

    def generate(self, prompts: Sequence[tuple[list[int], list[Frame]]], max_tokens: int, seed: int = 0) -> Any:
        refs = self.start(prompts, max_tokens, seed)
        return ray.get(refs, timeout=60)

    def start(self, prompts: Sequence[tuple[list[int], list[Frame]]], max_tokens: int, seed: int = 0) -> list[Any]:
        sampling = [Sampling(TEMPERATURE, max_tokens, seed + number) for number in range(len(prompts))]
        return [self.actor.generate.remote(*prompt, s) for prompt, s in zip(prompts, sampling, strict=True)]

    def prompt(self, frames: Sequence[Frame], text: str = "What is it?") -> tuple[list[int], list[Frame]]:
        ids = self.chat.encode_text("look: ")
        for _ in frames:
            ids += [self.chat.vision_start, self.chat.image_pad, self.chat.vision_end]
        return ids + self.chat.encode_text(text), list(frames)

    def push(self) -> Push:
        self.version += 1
        return publish(self.reference.parameters(), self.version)

    def load(self, push: Push) -> int:
        return ray.get(self.actor.update_weights.remote(push), timeout=30)

    def unfinished(self) -> int:
        return ray.get(self.actor.unfinished.remote(), timeout=10)


def make_frames(count: int, height: int, width: int, seed: int) -> list[Frame]:
    pixels = np.random.default_rng(seed).integers(0, 255, (count, height, width, 3), dtype=np.uint8)
    return [Frame(image, float(i), f"{seed}/{i}/{height}x{width}") for i, image in enumerate(pixels)]


def at_odd_times(frames: Sequence[Frame]) -> list[Frame]:
    """The same frames with gaps of 0.3 s and more between them."""
    times = np.cumsum(np.random.default_rng(len(frames)).uniform(0.3, 9.0, len(frames))).tolist()
    return [Frame(frame.pixels, time, f"{frame.key}@{time}") for frame, time in zip(frames, times, strict=True)]


def make_config(path: Path) -> Config:
    config = Config()
    config.model.path = str(path)
    config.model.dtype = "float32"
    config.model.context_length = 1024
    config.rollout.temperature = TEMPERATURE
    config.rollout.kv_cache_gb = 0.004
    config.rollout.start_timeout_s = 300.0
    config.rollout.turn_timeout_s = 60.0
    config.rollout.push_timeout_s = 30.0
    return config


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    cluster.add_node(num_cpus=1, resources={"other": 1})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def rig(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    class Driven(Generator):
        """Local, so that it is pickled by value: workers cannot import this file."""

        async def generate(self, ids: list[int], frames: list[Frame], sampling: Sampling) -> Generation:
            return await self._running.generate(ids, frames, sampling)

        async def unfinished(self) -> int:
            return self._running._llm.get_num_unfinished_requests()  # type: ignore[no-any-return]

    path = make_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    config = make_config(path)
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = actor_options(config, gpu=False) | {"scheduling_strategy": here}
    logs = tmp_path_factory.mktemp("logs")
    actor = ray.remote(Driven).options(**options).remote(config, 0, None, str(logs))
    info = ray.get(actor.ready.remote(), timeout=300)
    yield Rig(actor, info.pid, info.node_id, config, Chat.from_pretrained(path), Reference(path))
    children = psutil.Process(info.pid).children(recursive=True) if psutil.pid_exists(info.pid) else []
    ray.get(actor.shutdown.remote(), timeout=30)
    ray.kill(actor)
    assert not psutil.wait_procs(children, timeout=10)[1]
    unpublish()


def test_logprobs_are_the_learners_under_load_and_preemption(rig: Rig) -> None:
    """40 sequences of up to 300 tokens want twice the cache; the model samples vision ids now and then."""
    shapes = [(1, 32, 32), (6, 64, 96), (2, 224, 224), (0, 32, 32)]
    prompts = [rig.prompt(make_frames(*shapes[n % 4], seed=n % 4), "Which colour is it?") for n in range(40)]
    generations = rig.generate(prompts, max_tokens=300)
    assert sum(len(g.prompt_token_ids) + len(g.token_ids) for g in generations) > 8_500
    for (ids, frames), generation in zip(prompts, generations, strict=True):
        assert generation.prompt_token_ids == rig.chat.expand(ids, frames)
        assert not set(generation.token_ids) & set(rig.chat.vision_ids)
        ended = generation.token_ids[-1] == rig.chat.im_end
        assert (generation.finish_reason, ended or len(generation.token_ids) == 300) == (
            "stop" if ended else "length",
            True,
        )
    worst = max(rig.reference.gaps(g, p[1]).max() for p, g in zip(prompts[:12], generations[:12], strict=True))
    assert worst < EXACT


def test_videos_of_any_length_and_spacing_are_the_learners_too(rig: Rig) -> None:
    """A prompt with a video, then a reply with another one: ids and log-probs of the learner's own parts."""
    path = rig.config.model.path
    chat, collator = Chat.from_pretrained(path, "video"), Collator(path)
    policy = Policy.from_pretrained(path, torch.float32, chunk_tokens=64)
    policy.model.load_state_dict(rig.reference.model.state_dict())
    shapes = [(1, 32, 32), (4, 64, 96), (7, 64, 64), (16, 224, 224)]
    shown = [at_odd_times(make_frames(*shape, seed=20 + n)) for n, shape in enumerate(shapes)]
    trajectories = [Trajectory() for _ in shapes]
    turns = [[chat.prompt([Message("user", (Video(tuple(frames)), "Which colour is it?"))]) for frames in shown]]
    turns.append([chat.replies([Reply("look:", tuple(frames))], False, True, True) for frames in [*shown[1:3]] * 2])
    for suffixes in turns:
        whole = [(t.prompt_ids + s.ids, t.frames + s.frames) for t, s in zip(trajectories, suffixes, strict=True)]
        for trajectory, suffix, generation in zip(trajectories, suffixes, rig.generate(whole, 40), strict=True):
            expanded = chat.expand(suffix.ids, suffix.frames)
            assert generation.prompt_token_ids == trajectory.token_ids + expanded
            trajectory.append_prompt(expanded, suffix.ids, suffix.frames)
            trajectory.append_generated(generation.token_ids, generation.logprobs, generation.version)
    for trajectory in trajectories:
        row = TrainRow.of(trajectory)
        collator.check(row)
        with torch.no_grad():
            logprobs, _ = policy(collator.collate([row], [0]), TEMPERATURE)
        assert np.abs(logprobs.numpy() - row.behaviour_logprobs[row.generated]).max() < EXACT


def test_the_seed_decides(rig: Rig) -> None:
    prompt = rig.prompt(make_frames(2, 32, 32, seed=9))
    first, again, other = (rig.generate([prompt], 40, seed)[0].token_ids for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rig: rig.prompt(make_frames(1, 50, 70, seed=5)), "it resized a frame"),
        (lambda rig: ([rig.chat.video_pad, 5], make_frames(2, 40, 40, seed=6)), "The engine failed on a request"),
        (lambda rig: (rig.chat.encode_text("a" * 3000), []), "The engine failed on a request"),
        (lambda rig: ([rig.chat.image_pad, 5], []), "0 frames do not match the 1 image pads"),
    ],
    ids=["odd_frame", "odd_video", "too_long", "pad_without_frame"],
)
def test_what_cannot_be_sampled_is_an_engine_error(rig: Rig, make: Callable[[Rig], Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        rig.generate([make(rig)], 5)
    assert rig.generate([rig.prompt([])], 5)  # the engine lives


def test_a_cancelled_turn_ends_in_the_engine(rig: Rig) -> None:
    # So does one that misses its caller's deadline, which is a cancellation.
    refs = rig.start([rig.prompt([])] * 4, 900)
    wait_until(lambda: rig.unfinished() == 4)
    for ref in refs:
        ray.cancel(ref)
    wait_until(lambda: rig.unfinished() == 0)


def test_after_a_push_nothing_answers_with_old_weights(rig: Rig) -> None:
    """The prompt and its frames are in every cache when the weights change."""
    frames = make_frames(6, 64, 96, seed=1)
    prompt = rig.prompt(frames, "Which colour is it? " * 20)
    before = rig.generate([prompt], 40)[0]
    assert before.version == rig.version
    rig.reference.change(seed=1)
    assert rig.reference.gaps(before, frames).max() > 0.1
    assert rig.load(rig.push()) == rig.version
    after = rig.generate([prompt] * 4, 40)
    assert {g.version for g in after} == {rig.version}
    assert max(rig.reference.gaps(g, frames).max() for g in after) < EXACT


def test_an_engine_that_sleeps_answers_nothing_and_wakes_with_its_weights_or_with_those_of_a_push(rig: Rig) -> None:
    """On a CPU it frees no memory; that its caches are dropped, its scheduler stops and goes on again is the same."""
    frames = make_frames(4, 64, 64, seed=3)
    prompt = rig.prompt(frames, "Which colour is it? " * 20)
    for change in (False, True):
        rig.generate([prompt], 5)
        ray.get(rig.actor.sleep.remote(), timeout=30)
        assert ray.get(rig.actor.health.remote(10.0), timeout=30) == rig.version, "it sleeps, and lives"
        with pytest.raises(EngineError, match="sleeps"):
            rig.generate([prompt], 5)
        if change:
            rig.reference.change(seed=3)
            assert rig.load(rig.push()) == rig.version
        else:
            ray.get(rig.actor.wake.remote(), timeout=30)
        after = rig.generate([prompt] * 2, 40)
        assert {g.version for g in after} == {rig.version}
        assert max(rig.reference.gaps(g, frames).max() for g in after) < EXACT


def test_the_canary_sees_weights_that_did_not_arrive(rig: Rig) -> None:
    def check() -> float:
        run = ray.get(rig.actor.canary.remote(), timeout=30)
        row = canary_row(run)
        logprobs = rig.reference.logprobs(row.token_ids.tolist(), row.frames) * row.generated
        return check_canary([run], [logprobs], rig.version, "float32")

    assert check() < EXACT
    for name in ("lm_head.weight", "model.visual.merger.linear_fc2.weight"):
        parameter = dict(rig.reference.parameters())[name]
        kept = parameter.detach().clone()
        with torch.no_grad():
            parameter.add_(0.02 * torch.randn_like(parameter))
        with pytest.raises(CanaryError):
            check()
        with torch.no_grad():
            parameter.copy_(kept)
    assert check() < EXACT


def test_a_push_in_the_middle_of_turns_switches_them_over_cleanly(rig: Rig) -> None:
    """Each token's log-prob is that of the old weights up to some point and that of the new ones from there on."""
    frames = make_frames(4, 64, 64, seed=2)
    old = rig.version
    under_old = Reference(Path(rig.config.model.path))
    under_old.model.load_state_dict(rig.reference.model.state_dict())
    refs = rig.start([rig.prompt(frames)] * 6, 900, seed=50)
    rig.generate([rig.prompt([])], 4)  # came after the six: when it is done, they have begun
    rig.reference.change(seed=2)
    rig.load(rig.push())
    switched = 0
    for generation in ray.get(refs, timeout=60):
        old_gaps, new_gaps = under_old.gaps(generation, frames), rig.reference.gaps(generation, frames)
        at = int(np.argmax(old_gaps > EXACT)) if (old_gaps > EXACT).any() else len(old_gaps)
        assert new_gaps[at:].max(initial=0.0) < EXACT
        assert generation.version == (old if at else rig.version)
        switched += 0 < at < len(old_gaps)
    assert switched, "every turn was over before the push, or began after it"


def damaged(push: Push) -> Push:
    return replace(push, digest="0" * 16)


def gone(push: Push) -> Push:
    unpublish()
    return push


def renamed(push: Push) -> Push:
    first, *others = push.tensors
    return replace(push, tensors=(replace(first, name="x" + first.name), *others))


def broken_between_q_k_and_v(push: Push) -> Push:
    """Loads some tensors of a fused layer, then fails: what is half-loaded must not be counted in the next push."""
    tensors = [replace(t, dtype="nonsense") if ".layers.1.self_attn.k_proj" in t.name else t for t in push.tensors]
    return replace(push, tensors=tuple(tensors))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damaged, "arrived damaged"),
        (gone, "can no longer be read"),
        (renamed, "missing: model.*unknown: xmodel"),
        (broken_between_q_k_and_v, "has no attribute 'nonsense'"),
    ],
)
def test_a_failed_push_stops_all_work_until_a_whole_one(rig: Rig, spoil: Callable[[Push], Push], message: str) -> None:
    frames = make_frames(2, 32, 32, seed=3)
    rig.reference.change(seed=3)
    running = rig.start([rig.prompt(frames)] * 2, 900)
    wait_until(lambda: rig.unfinished() == 2)
    with pytest.raises(WeightError, match=message):
        rig.load(spoil(rig.push()))
    for ref in running:  # neither frozen for ever nor finished with mixed weights
        with pytest.raises(EngineError, match="does not hold whole weights"):
            ray.get(ref, timeout=10)
    with pytest.raises(EngineError, match="does not hold whole weights"):
        rig.generate([rig.prompt(frames)], 5)
    with pytest.raises(EngineError, match="does not hold whole weights"):
        ray.get(rig.actor.health.remote(5.0), timeout=10)
    rig.load(rig.push())
    assert rig.reference.gaps(rig.generate([rig.prompt(frames)], 40)[0], frames).max() < EXACT


def test_an_adapter_is_merged_into_the_checkpoint_and_into_nothing_else(rig: Rig) -> None:
    """The engine holds other weights by now; one of another base, or that fits nothing, is refused."""
    path = Path(rig.config.model.path)
    torch.manual_seed(5)
    adapter: dict[str, torch.Tensor] = {}
    expected = Reference(path)
    with torch.no_grad():
        for name, parameter in expected.parameters():
            if ".language_model.layers." in name and "_proj." in name:
                a, b = torch.randn(3, parameter.shape[1]), 0.1 * torch.randn(parameter.shape[0], 3)
                adapter |= {name.replace(".weight", f".lora_{part}.weight"): t for part, t in (("A", a), ("B", b))}
                parameter.add_(0.5 * b @ a)
    frames = make_frames(2, 32, 32, seed=6)
    base = Adapter(0.5, checkpoint_digest(path))
    for tensors, of, message in (
        (adapter, replace(base, base="0" * 16), "trained on another base"),
        ({f"x{name}": tensor for name, tensor in adapter.items()}, base, "none of the engine's checkpoint: unknown: x"),
    ):
        rig.version += 1
        with pytest.raises(WeightError, match=message):
            rig.load(publish(tensors.items(), rig.version, of))
    for _ in range(2):
        rig.version += 1
        rig.load(publish(adapter.items(), rig.version, base))
        generation = rig.generate([rig.prompt(frames)], 40)[0]
        assert expected.gaps(generation, frames).max() < EXACT
        assert Reference(path).gaps(generation, frames).max() > 0.1
    rig.load(rig.push())
    assert rig.reference.gaps(rig.generate([rig.prompt(frames)], 40)[0], frames).max() < EXACT


def test_weights_come_from_another_node(rig: Rig) -> None:
    @ray.remote(num_cpus=0, resources={"other": 1})
    class Elsewhere:
        def publish(self, parameters: list[tuple[str, torch.Tensor]], version: int) -> Push:
            return publish(parameters, version)

    rig.reference.change(seed=4)
    publisher = Elsewhere.remote()
    rig.version += 1
    push = ray.get(publisher.publish.remote([(n, p.detach()) for n, p in rig.reference.parameters()], rig.version))
    assert push.node_id != rig.node_id
    rig.load(push)
    frames = make_frames(2, 32, 32, seed=4)
    assert rig.reference.gaps(rig.generate([rig.prompt(frames)], 40)[0], frames).max() < EXACT
    ray.kill(publisher)


def test_an_engine_that_is_killed_fails_its_turns_at_once(rig: Rig) -> None:
    """Last of this engine's tests."""
    refs = rig.start([rig.prompt([])] * 2, 900)
    wait_until(lambda: rig.unfinished() == 2)
    engine = next(p for p in psutil.Process(rig.pid).children(recursive=True) if "EngineCore" in p.name())
    engine.kill()
    for ref in refs:
        with pytest.raises(EngineError, match="The engine failed"):
            ray.get(ref, timeout=20)
    with pytest.raises(EngineError, match="is dead"):
        ray.get(rig.actor.health.remote(5.0), timeout=20)


def test_a_killed_generator_takes_its_engine_along_and_its_successor_serves_the_pushed_weights(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The whole fleet, on a model whose embeddings are tied: one engine, killed outright while it works."""
    path = make_tiny_checkpoint(tmp_path / "model", tied=True)
    reference = Reference(path)
    assert "lm_head.weight" not in dict(reference.parameters())
    config = make_config(path)
    config.rollout.max_new_tokens = 200
    ray.cloudpickle.register_pickle_by_value(scripted)
    specs = [scripted.spec(group_id=f"g{n}", group_size=4) for n in range(6)]
    with GeneratorFleet(config, scripted.ScriptedPool(), tmp_path / "logs") as fleet:  # type: ignore[arg-type]
        (info,) = fleet.wait_started()
        reference.change(seed=7)
        fleet.push_weights(publish(reference.parameters(), 9))
        family = [psutil.Process(info.pid), *psutil.Process(info.pid).children(recursive=True)]
        assert any("EngineCore" in process.name() for process in family)
        batch = fleet.submit(specs)
        time.sleep(0.3)
        os.kill(info.pid, signal.SIGKILL)
        assert not psutil.wait_procs(family, timeout=10)[1]
        groups = batch.collect(len(specs))
        assert fleet.status()[0].restarts == 1
        (run,) = fleet.canary()
        row = canary_row(run)
        logprobs = reference.logprobs(row.token_ids.tolist(), row.frames) * row.generated
        check_canary([run], [logprobs], 9, "float32")
    assert sorted(group.group_id for group in groups) == [spec.group_id for spec in specs]
    assert all(len(group.episodes) == 4 and not group.failures for group in groups)
    assert {episode.policy_version for group in groups for episode in group.episodes} == {9}
    unpublish()


def test_a_generator_that_cannot_start_says_why(cluster: Cluster, tmp_path: Path) -> None:
    path = make_tiny_checkpoint(tmp_path / "model")
    (path / "model.safetensors").write_bytes(b"not a checkpoint")
    with (
        GeneratorFleet(make_config(path), None, tmp_path / "logs") as fleet,  # type: ignore[arg-type]
        pytest.raises(FleetError, match=r"(?s)could not be started.*generator_00\.log.*header"),
    ):
        fleet.wait_started()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10.0
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.02)
