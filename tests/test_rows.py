"""From groups to rows: which token gets which advantage, on records small enough to check by eye."""

from __future__ import annotations

import numpy as np
import pytest

from paravt_ray.chat import Chat
from paravt_ray.config import Config
from paravt_ray.episode import (
    CallRecord,
    CallStatus,
    Episode,
    Group,
    Rewards,
    Sample,
    ToolCall,
    Trajectory,
    TurnRecord,
)
from paravt_ray.learner.rows import build_rows, kl_penalties, set_advantages
from paravt_ray.parsing import parse_turn
from tests.tiny import make_tokenizer

SAMPLE = Sample("s", "Which?", ("/v.mp4",), "B", "mcq")
TEXT = "look\n</think>\n<answer>42</answer>"  # digits never share a token with a tag


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(make_tokenizer(["<answer>B</answer> look closer"] * 4), 32)


def trajectory(chat: Chat, text: str) -> Trajectory:
    """A prompt of three tokens and one turn that ends with its end-of-turn token."""
    ids = [*chat.encode_text("look</"), *chat._assistant(text), chat.im_end]
    prompt, turn = ids[:3], ids[3:]
    made = Trajectory()
    made.append_prompt(prompt, prompt, [])
    made.append_generated(turn, [-1.0] * len(turn), version=0)
    return made


def episode(chat: Chat, index: int, rewards: Rewards, subagents: int = 0) -> Episode:
    main = trajectory(chat, TEXT)
    call = ToolCall(True, "crop_video", 1.0, 2.0, None, "")
    shared = trajectory(chat, "red")
    records = [CallRecord(call, CallStatus.SERVED, "red", subagent=shared) for _ in range(subagents)]
    turn = TurnRecord(parse_turn(TEXT, think_prefilled=True), 3, len(main), "stop", calls=records)
    return Episode(SAMPLE, "g", index, 4, main, [turn], [0.0], True, "answered", rewards=rewards)


def rewards(accuracy: float, fmt: float) -> Rewards:
    return Rewards(accuracy + fmt, accuracy, fmt, 0.0, 0.0)


def test_format_is_credited_on_the_tags_alone(chat: Chat) -> None:
    """Two episodes that differ in format only: no token outside the tags may learn from it."""
    group = Group("g", SAMPLE, 4, [episode(chat, 0, rewards(1, 1.0)), episode(chat, 1, rewards(1, 0.0))])
    config = Config()
    config.algorithm.kl_coefficient = 0.0
    rows = build_rows([group], config)
    set_advantages(rows, [group], chat, config)
    for row, sign in zip(rows, (1, -1), strict=True):
        credited = chat.decode(row.token_ids[row.advantages != 0].tolist())
        assert credited == "</think><answer></answer><|im_end|>"
        assert set(np.sign(row.advantages[row.advantages != 0])) == {sign}


def test_scope_all_spreads_the_format_over_every_sampled_token(chat: Chat) -> None:
    group = Group("g", SAMPLE, 4, [episode(chat, 0, rewards(1, 1.0)), episode(chat, 1, rewards(1, 0.0))])
    config = Config()
    config.algorithm.kl_coefficient = 0.0
    config.algorithm.anchoring_scope = "all"
    rows = build_rows([group], config)
    set_advantages(rows, [group], chat, config)
    for row in rows:
        assert np.array_equal(row.advantages != 0, row.generated)
        assert len(set(row.advantages[row.generated])) == 1


def test_subagents_share_the_sequence_advantage_and_are_trained_once(chat: Chat) -> None:
    """Two duplicate calls share one sub-agent: its tokens count once, with what its answer was worth."""
    group = Group("g", SAMPLE, 4, [episode(chat, 0, rewards(1, 0.5), subagents=2), episode(chat, 1, rewards(0, 0.5))])
    config = Config()
    config.algorithm.kl_coefficient = 0.0
    rows = build_rows([group], config)
    assert [row.sequence_index for row in rows] == [0, 0, 1]
    set_advantages(rows, [group], chat, config)
    main, subagent, _ = rows
    assert set(subagent.advantages[subagent.generated]) == {main.advantages[main.generated][0]}
    assert main.advantages[main.generated][0] > 0
    config.rollout.train_subagents = False
    assert [row.sequence_index for row in build_rows([group], config)] == [0, 1]


def test_the_kl_penalty_is_the_sum_over_an_episodes_sampled_tokens(chat: Chat) -> None:
    group = Group("g", SAMPLE, 4, [episode(chat, 0, rewards(1, 1), subagents=1), episode(chat, 1, rewards(1, 1))])
    config = Config()
    config.algorithm.kl_coefficient = 0.01
    rows = build_rows([group], config)
    for row in rows:
        row.reference_logprobs = np.full(len(row.token_ids), -1.5, np.float32)  # sampled at -1.0
    sampled = [int(row.generated.sum()) for row in rows]
    expected = [0.01 * 0.5 * (sampled[0] + sampled[1]), 0.01 * 0.5 * sampled[2]]
    assert kl_penalties(rows, 2, config) == pytest.approx(expected)


def test_kl_is_no_signal_of_its_own(chat: Chat) -> None:
    """Equal rewards: what is left is the centred penalty, not a unit advantage made of its rounding."""
    group = Group("g", SAMPLE, 4, [episode(chat, 0, rewards(1, 1)), episode(chat, 1, rewards(1, 1))])
    config = Config()
    config.algorithm.kl_coefficient = 0.01
    rows = build_rows([group], config)
    for row, reference in zip(rows, (-1.5, -1.3), strict=True):
        row.reference_logprobs = np.full(len(row.token_ids), reference, np.float32)
    set_advantages(rows, [group], chat, config)
    half = 0.01 * 0.2 * int(rows[0].generated.sum()) / 2
    assert rows[0].advantages[rows[0].generated] == pytest.approx(-half, abs=1e-6)
    assert rows[1].advantages[rows[1].generated] == pytest.approx(half, abs=1e-6)


def test_the_format_weight_weighs(chat: Chat) -> None:
    group = Group("g", SAMPLE, 4, [episode(chat, 0, rewards(1, 1.0)), episode(chat, 1, rewards(1, 0.0))])
    largest = []
    for weight in (1.0, 0.25):
        config = Config()
        config.algorithm.kl_coefficient = 0.0
        config.reward.format_weight = weight
        rows = build_rows([group], config)
        set_advantages(rows, [group], chat, config)
        largest.append(float(rows[0].advantages.max()))
    assert largest[1] == pytest.approx(largest[0] / 4)


def test_an_unscored_episode_is_refused(chat: Chat) -> None:
    unscored = episode(chat, 0, rewards(1, 1))
    unscored.rewards = None
    group = Group("g", SAMPLE, 4, [unscored])
    config = Config()
    config.algorithm.kl_coefficient = 0.0
    with pytest.raises(ValueError, match="never scored"):
        set_advantages(build_rows([group], config), [group], chat, config)
