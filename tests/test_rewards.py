"""Rewards: the shared accuracy cases and their kinds, the formulas, policies that game them, and the reward actors."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from said import THOUGHT, episode

from paravt_ray.config import Config
from paravt_ray.episode import CallStatus, Episode, Frame, Group, Rewards, Trajectory
from paravt_ray.evaluation.heldout import report
from paravt_ray.rewards import accuracy, format_stats, score_episode
from paravt_ray.rewards.accuracy import parse_window
from paravt_ray.rewards.actor import RewardPool, RewardPoolError
from paravt_ray.rewards.choices import chosen_option
from paravt_ray.rewards.outcomes import ScoringFailure

CASES = [json.loads(line) for line in (Path(__file__).parent / "cases" / "accuracy.jsonl").read_text().splitlines()]
CALL = '<tool_call>\n{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}\n</tool_call>'


def score(*texts: str, config: Config | None = None, **options: Any) -> Rewards:
    return score_episode(episode(*texts, **options), config or Config())


# Accuracy


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['question_type']}: {case['answer']}")
def test_shared_case(case: dict[str, Any]) -> None:
    assert accuracy(case["answer"], case["gold"], case["question_type"]) == pytest.approx(case["score"], abs=1e-6)


@pytest.mark.parametrize(
    ("reply", "option"),
    [
        ("**C**", "C"),
        ("\\boxed{C}", "C"),
        ("option (e)", "E"),
        ("J", "J"),
        ("K", None),
        ("a", "A"),
        ("a man", None),
        ("A man", None),
        ("Answer: A man", None),
        ("Answer: A because he runs", "A"),
        ("The answer is a red car", None),
        ("The answer is A because he runs", "A"),
        ("I", "I"),
        ("I think so", None),
        ("I think it is B", "B"),
        ("So I choose B", "B"),
        ("Answer", None),
        ("Based on the frames", None),
        ("Vitamin C", None),
        ("c) five", "C"),
        ("D - five", "D"),
        ("B\nbecause it is red", "B"),
        ("B because it is red", "B"),
        ("B is right because option A is not", "B"),
        ("The answer is B. Wait, the answer is D.", "D"),
        ("The answer is B, not A", "B"),
        ("It is not A but B", "B"),
        ("It isn't C", None),
        ("It is certainly not (B)", None),
        ("It is certainly the red one (B)", "B"),
        ("neither A nor B", None),
        ("B or C", None),
        ("Option B or option C", None),
        ("The answer is B or C", None),
        ("It is A, B, C or D", None),
        ("A, B, C, D", None),
        ("(A) (B) (C) (D)", None),
        ("A. car\nB. bus\nC. van\nD. bike", None),
        ("A B C D", None),
    ],
)
def test_chosen_option(reply: str, option: str | None) -> None:
    assert chosen_option(reply) == option


@pytest.mark.parametrize(
    ("text", "window"),
    [
        ("24.3 - 30.4", (24.3, 30.4)),
        ("24.3-30.4", (24.3, 30.4)),
        ("3s–9s", (3, 9)),
        ("[3.2,9.8]", (3.2, 9.8)),
        ("[-3, 9]", (-3, 9)),
        ("1:05 to 1:20.5", (65, 80.5)),
        ("01:00:05-01:00:09", (3605, 3609)),
        ("It starts at 3 s and ends at 9 s.", (3, 9)),
        ('{"start": 3, "end": 9.5}', (3, 9.5)),
        ("In the 2 scenes, from 3 to 9", (3, 9)),
        ("[3, 9] (6 seconds)", (3, 9)),
        ("[0, 60], or rather [3, 9]", (3, 9)),
        ("[9, 3]", None),
        ("[3, 3]", None),
        ("5", None),
        ("1:90 - 2", None),
        ("9" * 60 + " - 3", None),
        ("nan - inf", None),
    ],
)
def test_parse_window(text: str, window: tuple[float, float] | None) -> None:
    assert parse_window(text) == window


def test_accuracy_of_open_ended_answers() -> None:
    assert accuracy("a big red car", "the red car", "oe") == pytest.approx(0.8)
    assert accuracy("red " * 10, "red car", "oe") == pytest.approx(2 / 12)  # a multiset, not a set
    assert accuracy("it's 3.5 m", "its 35 m", "oe") == pytest.approx(2 / 3)
    assert accuracy("The  Red car!", "red car", "oe", open_ended="exact") == 1.0
    assert accuracy("red car there", "red car", "oe", open_ended="exact") == 0.0


@pytest.mark.parametrize("answer", [None, "", " \n"])
@pytest.mark.parametrize(("gold", "kind"), [("A", "mcq"), ("[1, 2]", "tvg"), ("the", "oe")])
def test_nothing_is_never_right(answer: str | None, gold: str, kind: str) -> None:
    assert accuracy(answer, gold, kind) == 0.0


@pytest.mark.parametrize(("gold", "kind"), [("?", "mcq"), ("[2, 1]", "tvg"), ("?!", "oe"), ("A", "essay")])
def test_an_unusable_right_answer_is_an_error(gold: str, kind: str) -> None:
    with pytest.raises(ValueError, match=r"right answer|question type"):
        accuracy("A", gold, kind)


def test_long_answers_are_scored_quickly() -> None:
    start = time.process_time()
    for answer in [
        "A " * 50_000,
        "A, " * 30_000,
        "1 - " * 25_000,
        "(" * 100_000,
        "the answer is " * 7_000,
        " " * 99_999 + "A",
    ]:
        for gold, kind in [("A", "mcq"), ("[1, 2]", "tvg"), ("A", "oe")]:
            accuracy(answer, gold, kind)
    assert time.process_time() - start < 10.0


# Format, anchor, tool: by hand from the formulas


def test_perfect_direct_answer() -> None:
    # 0.2 + 0.3 + 0.2 + 0.5 * (0.4 + 0.3) + 0.1 = 1.15, clamped
    assert score(THOUGHT + "<answer>B</answer>") == Rewards(total=2.0, accuracy=1.0, format=1.0, anchor=0.7, tool=0.0)


def test_perfect_tool_use() -> None:
    rewards = score(THOUGHT + CALL + CALL, THOUGHT + "<answer>B</answer>")
    assert rewards == Rewards(total=2.8, accuracy=1.0, format=1.0, anchor=0.7, tool=0.8)


def test_format_terms() -> None:
    config = Config()
    config.reward.anchor_weight = 0.0  # shows the base below the clamp
    assert score(THOUGHT + "<answer>B</answer>", config=config).format == pytest.approx(0.8)
    assert score(THOUGHT + "<answer>B", config=config).format == pytest.approx(0.5)  # unbalanced
    assert score("so B <answer>B</answer>", config=config).format == pytest.approx(0.5)  # never closed
    assert score(THOUGHT + "<answer></answer>", config=config).format == pytest.approx(0.3)  # closed, but empty
    assert score("</think><answer>B</answer>", config=config).format == pytest.approx(0.6)  # thought nothing
    assert score(THOUGHT + "<answer>B</answer>" * 2, config=config).format == pytest.approx(0.6)  # not the only one
    assert score(THOUGHT + CALL, THOUGHT + "so B", config=config).format == pytest.approx(0.6)
    assert score("hm</think>" + CALL, THOUGHT + "so B", config=config).format == pytest.approx(0.3)  # 2 characters
    forced = episode(THOUGHT + CALL)
    forced.turns[0].forced, forced.turns[0].calls = True, []
    assert score_episode(forced, config).format == pytest.approx(0.3)  # its calls are not run
    config.reward.answer_suffix = False
    assert score(THOUGHT + "<answer>B</answer>", config=config).format == pytest.approx(0.7)
    assert score(THOUGHT + "<answer>B", config=config).format == pytest.approx(0.5)


def test_anchor_terms() -> None:
    assert score(THOUGHT + "so B").anchor == pytest.approx(0.4)
    assert score("so <answer>B</answer>").anchor == pytest.approx(-0.3)
    assert score("so B", prefix=False).anchor == 0.0  # never opened
    # Over several turns: closed means in every turn, never closed in any.
    assert score("look " + CALL, THOUGHT + "<answer>B</answer>").anchor == pytest.approx(-0.3)
    config = Config()
    config.reward.unclosed_penalty = 0.0
    assert score("so <answer>B</answer>", config=config).anchor == 0.0


@pytest.mark.parametrize("suffix", [True, False])
def test_closing_thinking_pays_with_the_forced_prefix(suffix: bool) -> None:
    """Scored without the prefix, which carries no loss, closing thinking would look like a stray tag and cost."""
    config = Config()
    config.reward.answer_suffix = suffix
    closed = score(THOUGHT + "<answer>B</answer>", config=config).format
    never = score("the red car <answer>B</answer>", config=config).format
    assert closed > never + 0.3


def test_tool_is_read_from_execution_records() -> None:
    def tool(*statuses: CallStatus, right: bool = False) -> float:
        answer = "B" if right else "C"
        return score(
            THOUGHT + CALL * len(statuses), f"{THOUGHT}<answer>{answer}</answer>", statuses=[list(statuses), []]
        ).tool

    served, failed, over, twice = CallStatus.SERVED, CallStatus.FAILED, CallStatus.OVER_CAP, CallStatus.DUPLICATE
    assert tool() == 0.0
    assert tool(CallStatus.INVALID) == 0.0  # well-formed, but wholly outside the video
    assert tool(failed) == tool(over) == tool(failed, failed) == 0.1
    assert tool(failed, right=True) == 0.1  # nothing was served that could have helped
    assert tool(served) == tool(served, *[twice] * 9) == tool(served, served) == tool(failed, served) == 0.3
    assert tool(served, right=True) == tool(served, *[twice] * 9, right=True) == 0.8
    assert score(f"{THOUGHT}<tool_call>{{</tool_call>", THOUGHT + "<answer>B</answer>").tool == 0.0


def test_tool_switch_and_format_weight() -> None:
    config = Config()
    config.reward.tool, config.reward.format_weight = False, 0.5
    rewards = score(THOUGHT + CALL, THOUGHT + "<answer>B</answer>", config=config)
    assert (rewards.tool, rewards.format, rewards.total) == (0.0, 1.0, 1.5)


def test_an_episode_without_answer_turn() -> None:
    assert score(THOUGHT + CALL).accuracy == 0.0
    assert score() == Rewards(0.0, 0.0, 0.0, 0.0, 0.0)


HONEST_WRONG = score(THOUGHT + "<answer>C</answer>")
HONEST_RIGHT = score(THOUGHT + "<answer>B</answer>")
HONEST_WRONG_WITH_TOOL = score(THOUGHT + CALL, THOUGHT + "<answer>C</answer>")
REPLY = "<tool_response>\nIt is a bus.\n</tool_response>"
GAMES = {
    "empty tags": ["</think><answer></answer>"],
    "blank tags": ["  </think><tool_call> </tool_call><answer> </answer>"],
    "repeated blocks": [(THOUGHT + "<think>") * 3 + THOUGHT + "<answer>C</answer><answer>C</answer>"],
    "repeated calls": [THOUGHT + CALL * 10, THOUGHT + "<answer>C</answer>"],
    "hallucinated replies": [THOUGHT + CALL + REPLY + "<think>" + THOUGHT + "<answer>C</answer>"],
    "replies without calls": [THOUGHT + REPLY * 5 + "<answer>C</answer>"],
    "calls in thinking": [CALL * 5 + THOUGHT + "<answer>C</answer>"],
    "all options": [THOUGHT + "<answer>A, B, C, D</answer>"],
    "all options with text": [THOUGHT + "<answer>A. car B. bus C. van D. bike</answer>"],
    "one answer each": [THOUGHT + "".join(f"<answer>{letter}</answer>" for letter in "ABCD")],
    "the question mark": [THOUGHT + "<answer>?</answer>"],
    "tags as content": [THOUGHT + "<answer></think><tool_call></tool_call></answer>"],
}


@pytest.mark.parametrize("name", GAMES)
def test_no_game_beats_an_honest_try(name: str) -> None:
    texts = GAMES[name]
    done = episode(*texts)
    for i, record in enumerate(record for turn in done.turns for record in turn.calls):
        if record.call.ok and i > 0:
            record.status = CallStatus.DUPLICATE
    rewards = score_episode(done, Config())
    honest = HONEST_WRONG_WITH_TOOL if rewards.tool else HONEST_WRONG
    assert rewards.accuracy == 0.0
    assert rewards.total <= honest.total
    assert rewards.total < HONEST_RIGHT.total


PARTIAL = {  # kind, right answer, given answer, R_acc
    "the whole video": ("tvg", "[40, 50]", "[0, 200]", 10 / 200),
    "a second of overlap": ("tvg", "[40, 50]", "[49, 60]", 1 / 20),
    "many words": ("oe", "a red ball", " ".join(["red", *(f"thing{i}" for i in range(19))]), 2 / 22),
    "one word again and again": ("oe", "a red ball", "red " * 10, 2 / 12),
}


@pytest.mark.parametrize(("kind", "gold", "answer", "accurate"), PARTIAL.values(), ids=PARTIAL)
def test_what_a_game_for_partial_credit_is_worth_at_most(kind: str, gold: str, answer: str, accurate: float) -> None:
    """A weakness of the paper's R_tool, kept and shown in docs/method.md: one call makes 0.8 of any R_acc above 0."""
    ending = f"{THOUGHT}<answer>{answer}</answer>"
    assert score(ending, kind=kind, gold=gold).total == pytest.approx(1.0 + accurate)
    most = max(score(THOUGHT + CALL * calls, ending, kind=kind, gold=gold).total for calls in (1, 2, 10))
    assert most == pytest.approx(1.0 + accurate + 0.8)


@pytest.mark.parametrize(
    ("kind", "gold", "answer", "looked", "worth"),
    [
        ("tvg", "[40, 50]", "[43, 53]", False, 7 / 13),
        ("tvg", "[40, 50]", "[51, 60]", True, 0.3),
        ("oe", "a red ball", "a red car", False, 0.5),
        ("tvg", "[40, 50]", "[40, 50]", True, 1.8),
        ("oe", "a red ball", "a red ball", True, 1.8),
    ],
)
def test_what_honest_answers_are_worth_beside_those_games(
    kind: str, gold: str, answer: str, looked: bool, worth: float
) -> None:
    """Near misses are worth less than the games are, right answers with a call are worth more."""
    ending = f"{THOUGHT}<answer>{answer}</answer>"
    assert score(*[THOUGHT + CALL] * looked, ending, kind=kind, gold=gold).total == pytest.approx(1.0 + worth)


def test_repeated_and_misordered_blocks_lose_format() -> None:
    perfect = HONEST_WRONG.format
    for game in ("empty tags", "repeated blocks", "one answer each", "calls in thinking"):
        assert score(*GAMES[game]).format < perfect
    assert score("<answer>C</answer>" + THOUGHT, prefix=False).format < perfect


# Format statistics


def test_format_stats() -> None:
    good = format_stats(episode(THOUGHT + CALL, THOUGHT + "<answer>B</answer>"))
    assert (good.compliance, good.think_closed, good.answer_closed, good.calls_closed) == (True, True, True, True)
    lost = format_stats(episode("look " + CALL.removesuffix("</tool_call>"), THOUGHT + "<answer>B"))
    assert (lost.compliance, lost.think_closed, lost.answer_closed, lost.calls_closed) == (False, False, False, False)
    assert format_stats(episode(THOUGHT + "<answer>B</answer>")).calls_closed is None
    assert not format_stats(episode()).compliance


@pytest.mark.parametrize(
    "texts",
    [
        [THOUGHT + "<answer>B</answer><answer>B</answer>"],
        [THOUGHT + "<think>again</think><answer>B</answer>"],
        [THOUGHT + CALL + "<answer>B</answer>"],
        [THOUGHT + CALL],
        [THOUGHT + "<answer>B</answer>", THOUGHT + "<answer>B</answer>"],
        [THOUGHT + "nothing", THOUGHT + "<answer>B</answer>"],
        [THOUGHT + "<tool_call>{</tool_call>", THOUGHT + "<answer>B</answer>"],
        [THOUGHT + "<tool_code>crop_video('a', 1, 2)</tool_code>", THOUGHT + "<answer>B</answer>"],
        [" </think><answer>B</answer>"],
        [THOUGHT + "<answer> </answer>"],
        [THOUGHT + REPLY + "<answer>B</answer>"],
        ["<think>" + THOUGHT + "<answer>B</answer>"],
    ],
)
def test_not_compliant(texts: list[str]) -> None:
    assert not format_stats(episode(*texts)).compliance


# Actors


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def pool(cluster: None) -> Iterator[RewardPool]:
    config = Config()
    config.reward.workers, config.reward.timeout_s = 2, 30.0
    pool = RewardPool(config)
    yield pool
    pool.close()


def hostile_answer(action: str) -> str:
    """Text on which the scorer, in its own process, hangs or dies. Defined inside, so that it travels by value."""

    class Hostile(str):
        def strip(self, *_: object) -> str:
            if action == "spin":
                while True:
                    pass
            os._exit(1)

    return Hostile("B")


def with_answer(answer: str) -> Episode:
    done = episode(THOUGHT + "<answer>B</answer>")
    done.turns[-1].turn = replace(done.turns[-1].turn, answer=answer)
    return done


def test_pool_scores_as_the_function_does(pool: RewardPool) -> None:
    episodes = [episode(THOUGHT + CALL, f"{THOUGHT}<answer>{letter}</answer>") for letter in "ABCDABCDABCD"]
    assert pool.score(episodes) == [score_episode(done, Config()) for done in episodes]
    assert pool.score([]) == []


def test_tokens_and_frames_stay_with_the_driver(pool: RewardPool) -> None:
    """Frames of one step would fill the object store; they are not even picklable here, and scored all the same."""

    class Unpicklable(Frame):
        def __reduce__(self) -> Any:
            raise AssertionError("a frame left the driver")

    done = episode(THOUGHT + CALL, THOUGHT + "<answer>B</answer>")
    for trajectory in (done.trajectory, Trajectory()):
        trajectory.append_prompt([1], [1], [Unpicklable(np.zeros((2, 2, 3), np.uint8), 0.0, "k")])
        done.turns[0].calls[0].subagent = trajectory
    (outcome,) = pool.score([done])
    assert outcome == score_episode(done, Config())
    assert len(done.trajectory) == 1 and done.turns[0].calls[0].subagent is not None


def test_unscorable_episodes_are_left_out_and_counted(pool: RewardPool) -> None:
    good, bad = episode(THOUGHT + "<answer>B</answer>"), episode(THOUGHT + "<answer>B</answer>", gold="?")
    group = Group("g", good.sample, 4, [good, bad])
    assert pool.score_groups([group]) == 1
    assert group.episodes == [good] and good.rewards is not None and bad.rewards is None
    assert len(group.failures) == 1 and "names no option" in group.failures[0]


def test_a_dying_scorer_costs_one_episode(pool: RewardPool) -> None:
    good = [episode(THOUGHT + "<answer>B</answer>") for _ in range(20)]
    outcomes = pool.score([*good[:10], with_answer(hostile_answer("die")), *good[10:]])
    failures = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, ScoringFailure)]
    assert failures == [10] and "lost" in str(outcomes[10])
    assert pool.replacements == 2  # with its neighbours, then alone


def test_a_held_out_answer_that_kills_the_scorer_costs_itself_alone(pool: RewardPool) -> None:
    episodes = [episode(THOUGHT + "<answer>B</answer>") for _ in range(2)] + [with_answer(hostile_answer("die"))]
    groups = [Group(f"g{number}", done.sample, 4, [done]) for number, done in enumerate(episodes)]
    found = report(3, groups, pool.score)
    assert (found.scored, found.failures) == (2, {"reward": 1})


def test_a_spinning_scorer_is_ended_at_the_deadline(cluster: None) -> None:
    config = Config()
    config.reward.timeout_s = 10.0
    pool = RewardPool(config)
    start = time.monotonic()
    (failure,) = pool.score([with_answer(hostile_answer("spin"))])
    assert isinstance(failure, ScoringFailure) and "reward.timeout_s" in failure.reason
    assert time.monotonic() - start < 30.0
    assert pool.score([episode(THOUGHT + "<answer>B</answer>")]) == [HONEST_RIGHT]
    pool.close()


def test_a_full_cluster_is_reported(cluster: None) -> None:
    config = Config()
    config.reward.workers, config.reward.timeout_s = 50, 3.0
    with pytest.raises(RewardPoolError, match="needs 1 CPU"):
        RewardPool(config)
