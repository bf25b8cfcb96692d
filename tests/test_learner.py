"""One rank of the learner: what it computes is what transformers computes, however the rows are cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learning import largest_difference, make_config, make_frame, make_learner, make_row, weights

from paravt_ray.chat import Chat
from paravt_ray.config import Config, ConfigError, check_config
from paravt_ray.episode import Frame, InvalidTrajectoryError, TrainRow
from paravt_ray.learner.batching import Collator
from paravt_ray.learner.learner import Learner, LearnerError
from paravt_ray.learner.schedule import LrSchedule

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def learner(tiny_path: Path) -> Iterator[Learner]:
    learner = make_learner(tiny_path, make_config())
    yield learner
    learner.close()


def updated(path: Path, config: Config, rows: list[TrainRow], times: int = 2) -> dict[str, np.ndarray]:
    """Weights after some updates on the same rows."""
    learner = make_learner(path, config)
    for _ in range(times):
        learner.update(rows)
    result = weights(learner)
    learner.close()
    return result


# ---- against transformers ------------------------------------------------------------------------------------------


class Reference:
    """The model in transformers, one row at a time, nothing packed, frames through the checkpoint's own processor."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoImageProcessor, Qwen3VLForConditionalGeneration

        self.model = Qwen3VLForConditionalGeneration.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        )
        self.processor = AutoImageProcessor.from_pretrained(path)
        self.image_pad = self.model.config.image_token_id

    def pixels(self, frames: list[Frame]) -> dict[str, torch.Tensor]:
        if not frames:
            return {}
        return dict(self.processor([f.pixels for f in frames], do_resize=False, return_tensors="pt"))

    def positions(self, row: TrainRow) -> torch.Tensor:
        ids = torch.from_numpy(row.token_ids)[None]
        is_image = (ids == self.image_pad).int()
        grid = self.pixels(row.frames).get("image_grid_thw")
        return self.model.model.get_rope_index(ids, is_image, grid)[0]

    def logprobs(self, row: TrainRow, temperature: float) -> np.ndarray:
        ids = torch.from_numpy(row.token_ids)[None]
        pixels = self.pixels(row.frames)
        with torch.no_grad():
            logits = self.model(input_ids=ids, mm_token_type_ids=(ids == self.image_pad).int(), **pixels).logits[0]
        log_p = torch.log_softmax(logits.float() / temperature, -1)
        shifted = torch.cat([torch.zeros(1), log_p[:-1].gather(-1, ids[0, 1:, None])[:, 0]])
        return np.where(row.generated, shifted.numpy(), 0)


@pytest.fixture(scope="module")
def reference(tiny_path: Path) -> Reference:
    return Reference(tiny_path)


@pytest.mark.parametrize("budget", [32768, 700, 1])
def test_logprobs_are_those_of_transformers(
    tiny_path: Path, tiny_rows: list[TrainRow], reference: Reference, budget: int
) -> None:
    config = make_config(micro_batch_tokens=budget, logprob_chunk_tokens=7)
    config.rollout.temperature = 0.7
    learner = make_learner(tiny_path, config)
    found = learner.logprobs(tiny_rows)
    learner.close()
    for index, row in enumerate(tiny_rows):
        np.testing.assert_allclose(found[index], reference.logprobs(row, 0.7), atol=2e-5)


def test_positions_and_pixels_are_those_of_transformers(
    tiny_path: Path, tiny_rows: list[TrainRow], reference: Reference
) -> None:
    collator = Collator(tiny_path)
    for index, row in enumerate(tiny_rows):
        batch = collator.collate(tiny_rows, [index])
        np.testing.assert_array_equal(batch.position_ids, reference.positions(row))
        if row.frames:
            pixels = reference.pixels(row.frames)
            assert torch.equal(batch.pixel_values, pixels["pixel_values"])
            assert torch.equal(batch.frame_grid, pixels["image_grid_thw"])


TIMES = [0.25, 1.0, 7.5, 31.96, 40.04]


@pytest.fixture(scope="module")
def video_row(tiny_path: Path) -> TrainRow:
    """A row with a video of an odd number of frames at irregular times."""
    noise = [make_frame(number, 64, 96) for number in range(len(TIMES))]
    frames = [Frame(frame.pixels, time, frame.key) for frame, time in zip(noise, TIMES, strict=True)]
    return make_row(Chat.from_pretrained(tiny_path, "video"), frames, "<think>\nred</think><answer>A</answer>")


def test_a_video_in_groups_is_the_whole_video_of_transformers(
    tiny_path: Path, tiny_rows: list[TrainRow], video_row: TrainRow, reference: Reference
) -> None:
    """Ids, pixels, positions and log-probs, alone and packed with rows that show images."""
    from transformers import AutoProcessor

    pixels = np.stack([frame.pixels for frame in video_row.frames[: len(TIMES)]])
    seen = AutoProcessor.from_pretrained(tiny_path)(
        text=["<|video_pad|>"],
        videos=[pixels],
        video_metadata=[{"fps": 1.0, "frames_indices": list(TIMES), "total_num_frames": len(TIMES)}],
        do_resize=False,
        do_sample_frames=False,
        return_tensors="pt",
    )
    grid, ids = seen["video_grid_thw"], torch.from_numpy(video_row.token_ids)[None]
    assert grid.tolist() == [[3, 4, 6]]
    assert (
        seen["input_ids"][0].tolist()
        in np.lib.stride_tricks.sliding_window_view(video_row.token_ids, seen["input_ids"].shape[1]).tolist()
    )
    collator = Collator(tiny_path)
    collator.check(video_row)
    batch = collator.collate([video_row], [0])
    assert torch.equal(batch.pixel_values, seen["pixel_values_videos"])
    is_video = 2 * (ids == reference.model.config.video_token_id).int()
    expected = reference.model.model.get_rope_index(ids, is_video, None, grid)[0]
    np.testing.assert_array_equal(batch.position_ids, expected)
    with torch.no_grad():
        logits = reference.model(
            input_ids=ids,
            mm_token_type_ids=is_video,
            pixel_values_videos=seen["pixel_values_videos"],
            video_grid_thw=grid,
        ).logits[0]
    log_p = torch.log_softmax(logits[:-1] / 0.7, -1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
    config = make_config()
    config.rollout.temperature = 0.7
    learner = make_learner(tiny_path, config)
    alone, packed = learner.logprobs([video_row])[0], learner.logprobs([*tiny_rows, video_row])
    learner.close()
    where = np.flatnonzero(video_row.generated)
    np.testing.assert_allclose(alone[where], log_p[where - 1], atol=1e-5)
    np.testing.assert_allclose(packed[len(tiny_rows)], alone, atol=1e-5)
    np.testing.assert_allclose(packed[1], reference.logprobs(tiny_rows[1], 0.7), atol=2e-5)


@pytest.mark.parametrize("fault", ["frame missing", "two sizes", "two kinds", "frame too many"])
def test_videos_that_do_not_line_up_are_refused(tiny_path: Path, video_row: TrainRow, fault: str) -> None:
    row = TrainRow(**{**vars(video_row), "token_ids": video_row.token_ids.copy(), "frames": [*video_row.frames]})
    pads = np.flatnonzero(row.token_ids == Chat.from_pretrained(tiny_path).video_pad)
    if fault == "frame missing":
        row.frames.pop()
    elif fault == "two sizes":
        row.frames[1] = make_frame(1, 96, 64)
    elif fault == "two kinds":
        row.token_ids[pads[1]] = Chat.from_pretrained(tiny_path).image_pad
    else:
        row.frames.append(row.frames[-1])
    with pytest.raises(InvalidTrajectoryError, match="18 pads do not stand where"):
        Collator(tiny_path).check(row)


def test_a_frame_below_the_processors_smallest_size_is_not_enlarged(tiny_path: Path, tiny_chat: Chat) -> None:
    processor = Collator(tiny_path)._processor
    processor.size = {"shortest_edge": 64 * 64, "longest_edge": 1 << 20}
    collator = Collator(tiny_path)
    collator._processor = processor
    batch = collator.collate([make_row(tiny_chat, [make_frame(0)], "A")], [0])
    assert batch.frame_grid.tolist() == [[1, 2, 2]]


def test_shared_frames_are_encoded_once_and_get_the_same_gradient(tiny_path: Path, tiny_rows: list[TrainRow]) -> None:
    collator = Collator(tiny_path)
    copies = [
        TrainRow(**{**vars(row), "frames": [Frame(f.pixels, f.time_s, f"{i}/{j}") for j, f in enumerate(row.frames)]})
        for i, row in enumerate(tiny_rows)
    ]
    indices = range(len(tiny_rows))
    assert len(collator.collate(tiny_rows, indices).frame_grid) == len({f for row in tiny_rows for f in row.frames})
    assert len(collator.collate(copies, indices).frame_grid) == sum(len(row.frames) for row in tiny_rows)
    one, other = updated(tiny_path, make_config(), tiny_rows), updated(tiny_path, make_config(), copies)
    assert largest_difference(one, other) < 1e-4


def test_every_tensor_of_the_checkpoint_has_its_name(tiny_path: Path, learner: Learner) -> None:
    from safetensors import safe_open

    with safe_open(tiny_path / "model.safetensors", "pt") as stored:
        assert {name: list(t.shape) for name, t in learner.named_tensors()} == {
            name: stored.get_slice(name).get_shape()
            for name in stored.keys()  # noqa: SIM118
        }


def test_bfloat16_keeps_the_rotary_frequencies_in_float32(tiny_path: Path) -> None:
    config = make_config(zero_stage=2)
    config.model.dtype = "bfloat16"
    learner = make_learner(tiny_path, config)
    buffers = {name: b.dtype for name, b in learner._engine._model.named_buffers() if "inv_freq" in name}
    learner.close()
    assert buffers and set(buffers.values()) == {torch.float32}


# ---- invariance ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "aggregation"), [("ppo", "token_mean"), ("gspo", "sequence_mean"), ("cispo", "dr_grpo")]
)
def test_the_gradient_does_not_depend_on_micro_batches(
    tiny_path: Path, tiny_rows: list[TrainRow], loss: str, aggregation: str
) -> None:
    results = []
    for budget in (32768, 1):
        config = make_config(micro_batch_tokens=budget)
        config.algorithm.loss, config.algorithm.aggregation = loss, aggregation
        results.append(updated(tiny_path, config, tiny_rows, times=1))
    # Adam's first step is lr * sign(gradient) and magnifies rounding where a gradient is almost 0.
    assert largest_difference(*results) < 1e-4


def test_the_same_rows_give_the_same_weights_to_the_last_bit(tiny_path: Path, tiny_rows: list[TrainRow]) -> None:
    one, other = updated(tiny_path, make_config(), tiny_rows), updated(tiny_path, make_config(), tiny_rows)
    assert all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 1},
        {"zero_stage": 2},
        {"zero_stage": 3},
        {"zero_stage": 2, "offload_optimizer": True},
        {"zero_stage": 3, "offload_optimizer": True, "activation_checkpointing": True},
        {"zero_stage": 0, "activation_checkpointing": True},
    ],
    ids=str,
)
def test_how_memory_is_saved_changes_rounding_only(
    tiny_path: Path, tiny_rows: list[TrainRow], settings: dict[str, Any]
) -> None:
    schedule: dict[str, Any] = {"schedule": "cosine", "warmup_steps": 2}  # the rate must reach every optimizer
    plain = updated(tiny_path, make_config(**schedule), tiny_rows)
    assert largest_difference(plain, updated(tiny_path, make_config(**schedule, **settings), tiny_rows)) < 1e-4


def test_bfloat16_adds_up_many_small_gradients_in_float32(tiny_path: Path, tiny_chat: Chat) -> None:
    row = make_row(tiny_chat, [], "A")
    norms = []
    for copies in (1, 300):  # in bfloat16, 1/300 more or less is lost in the sum
        config = make_config(zero_stage=2, micro_batch_tokens=1)
        config.model.dtype = "bfloat16"
        learner = make_learner(tiny_path, config)
        norms.append(learner.update([row] * copies)["train/grad_norm"])
        learner.close()
    assert norms[0] == pytest.approx(norms[1], rel=1e-2)


# ---- update --------------------------------------------------------------------------------------------------------


def on_policy(learner: Learner, rows: list[TrainRow]) -> list[TrainRow]:
    """The rows as the learner's own policy would have sampled them."""
    found = learner.logprobs(rows)
    return [TrainRow(**{**vars(row), "behaviour_logprobs": found[i]}) for i, row in enumerate(rows)]


def test_on_policy_rows_have_no_gap_no_clipping_and_the_hand_computed_loss(
    learner: Learner, tiny_rows: list[TrainRow]
) -> None:
    metrics = learner.update(on_policy(learner, tiny_rows))
    advantages = np.concatenate([row.advantages[row.generated] for row in tiny_rows])
    assert metrics["train/logp_gap"] < 1e-6
    assert metrics["train/clip_fraction"] == 0
    assert metrics["train/behaviour_weight"] == pytest.approx(1, abs=1e-5)
    assert metrics["train/loss"] == pytest.approx(-advantages.mean(), rel=1e-5)
    assert 0 < metrics["train/entropy"] < np.log(400)
    assert metrics["train/lr"] == 1e-2


def test_the_gap_is_the_mean_absolute_difference_to_the_generator(learner: Learner, tiny_rows: list[TrainRow]) -> None:
    found = learner.logprobs(tiny_rows)
    gaps = [np.abs(found[i] - row.behaviour_logprobs)[row.generated] for i, row in enumerate(tiny_rows)]
    assert learner.update(tiny_rows)["train/logp_gap"] == pytest.approx(np.concatenate(gaps).mean(), rel=1e-5)


def test_several_updates_compare_with_the_policy_before_the_first_of_them(
    tiny_path: Path, tiny_rows: list[TrainRow]
) -> None:
    learner = make_learner(tiny_path, make_config(updates_per_step=3))
    metrics = learner.update(on_policy(learner, tiny_rows))
    learner.close()
    assert learner.steps_done == 3
    # Asked after the first step, with this learning rate, the policy is another one.
    assert metrics["train/logp_gap"] < 1e-6
    assert metrics["train/clip_fraction"] > 0


def test_an_update_raises_what_had_a_positive_advantage(learner: Learner, tiny_rows: list[TrainRow]) -> None:
    before = learner.logprobs(tiny_rows)
    learner.update(on_policy(learner, tiny_rows))
    after = learner.logprobs(tiny_rows)
    change = [((after[i] - before[i]) * row.advantages).sum() for i, row in enumerate(tiny_rows)]
    assert sum(change) > 0


@pytest.mark.parametrize("pad", ["image_pad", "video_pad"])
def test_a_row_in_which_the_policy_sampled_a_pad_is_dropped_alone(
    tiny_path: Path, tiny_chat: Chat, tiny_rows: list[TrainRow], pad: str
) -> None:
    without = updated(tiny_path, make_config(), tiny_rows, times=1)
    learner = make_learner(tiny_path, make_config())
    bad = TrainRow(**{**vars(tiny_rows[0]), "token_ids": tiny_rows[0].token_ids.copy()})
    bad.token_ids[-2] = getattr(tiny_chat, pad)
    metrics = learner.update([*tiny_rows, bad])
    assert metrics["train/rows_dropped"] == 1
    assert largest_difference(weights(learner), without) == 0
    with pytest.raises(LearnerError, match="None of the 1 rows"):
        learner.update([bad])
    learner.close()


@pytest.mark.parametrize("fault", ["shorter", "no frame", "odd size", "generated first", "no number"])
def test_rows_that_do_not_line_up_are_refused(tiny_path: Path, tiny_rows: list[TrainRow], fault: str) -> None:
    row = TrainRow(**vars(tiny_rows[0]))
    if fault == "shorter":
        row.advantages = row.advantages[1:]
    elif fault == "no frame":
        row.frames = row.frames[1:]
    elif fault == "odd size":
        row.frames = [Frame(np.zeros((48, 32, 3), np.uint8), 0, "odd"), *row.frames[1:]]
    elif fault == "no number":
        row.behaviour_logprobs = np.full_like(row.behaviour_logprobs, -np.inf)
    else:
        row.generated = np.ones_like(row.generated)
    with pytest.raises(InvalidTrajectoryError):
        Collator(tiny_path).check(row)


def test_rows_without_any_trained_token_change_nothing_and_have_finite_metrics(
    tiny_path: Path, tiny_rows: list[TrainRow]
) -> None:
    silent = [TrainRow(**{**vars(row), "generated": np.zeros_like(row.generated)}) for row in tiny_rows]
    learner = make_learner(tiny_path, make_config(weight_decay=0.0))
    before = weights(learner)
    metrics = learner.update(silent)
    assert all(np.isfinite(value) for value in metrics.values())
    assert largest_difference(before, weights(learner)) == 0
    learner.close()


def test_a_loss_that_is_not_finite_stops_the_run_before_the_weights_are_touched(
    learner: Learner, tiny_rows: list[TrainRow]
) -> None:
    before = weights(learner)
    poisoned = TrainRow(**{**vars(tiny_rows[0]), "advantages": np.full_like(tiny_rows[0].advantages, np.inf)})
    with pytest.raises(LearnerError, match="optimizer step 0"):
        learner.update([poisoned])
    assert largest_difference(before, weights(learner)) == 0


@pytest.mark.parametrize("stage", [0, 2])
def test_a_gradient_that_is_not_finite_is_an_error_though_the_loss_is(
    tiny_path: Path, tiny_rows: list[TrainRow], stage: int
) -> None:
    """Also without ZeRO, where the norm is ours: the squares of such a gradient overflow."""
    learner = make_learner(tiny_path, make_config(zero_stage=stage))
    steep = TrainRow(**{**vars(tiny_rows[0]), "advantages": 1e30 * tiny_rows[0].advantages})
    with pytest.raises(LearnerError, match="gradient has the norm inf in optimizer step 0"):
        learner.update([steep])
    learner.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_the_reference_policy_stays_and_its_divergence_is_measured(
    tiny_path: Path, tiny_rows: list[TrainRow], stage: int
) -> None:
    config = make_config(zero_stage=stage)
    config.algorithm.kl_coefficient, config.algorithm.kl_placement = 0.1, "loss"
    config.algorithm.kl_estimator = "k3"
    learner = make_learner(tiny_path, config, reference_path=tiny_path)
    first = learner.reference_logprobs(tiny_rows)
    kls = [learner.update(on_policy(learner, tiny_rows))["train/kl"] for _ in range(3)]
    again = learner.reference_logprobs(tiny_rows)
    learner.close()
    assert kls[0] == pytest.approx(0, abs=1e-6) and kls[2] > 1e-3
    assert all(np.array_equal(first[i], again[i]) for i in first)


def test_supervised_steps_lower_the_mean_cross_entropy_that_they_report(
    learner: Learner, tiny_rows: list[TrainRow]
) -> None:
    total, tokens = learner.cross_entropy(tiny_rows)
    assert tokens == sum(row.generated.sum() for row in tiny_rows)
    losses = [learner.fit(tiny_rows)["train/loss"] for _ in range(3)]
    assert losses[0] == pytest.approx(total / tokens, rel=1e-5)
    assert losses[2] < losses[1] < losses[0]


# ---- settings ------------------------------------------------------------------------------------------------------


def test_the_learning_rate_rises_linearly_and_falls_as_half_a_cosine() -> None:
    schedule = LrSchedule(peak=1.0, warmup_steps=4, total_steps=12, kind="cosine")
    assert [schedule.at(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert schedule.at(8) == pytest.approx(0.5) and schedule.at(12) == pytest.approx(0.0)
    assert LrSchedule(1.0, 0, 12, "constant").at(11) == 1.0


def test_a_warm_up_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learner\.warmup_steps is 500"):
        LrSchedule.from_config(make_config(warmup_steps=500).learner, 54)


def test_bfloat16_without_zero_is_refused() -> None:
    config = make_config()
    config.model.dtype = "bfloat16"
    with pytest.raises(ConfigError, match=r"learner\.zero_stage"):
        check_config(config)
