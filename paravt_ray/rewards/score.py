"""One episode's rewards."""

from __future__ import annotations

from paravt_ray.config import Config
from paravt_ray.episode import Episode, Rewards
from paravt_ray.rewards.accuracy import accuracy
from paravt_ray.rewards.format import score_format
from paravt_ray.rewards.tool import score_tool


def score_episode(episode: Episode, config: Config, judged: float | None = None) -> Rewards:
    """R = R_acc + w_fmt * R_fmt + R_tool (ParaVT, arXiv 2605.20342, section 4), of the whole trajectory.

    `format` is R_fmt before its weight, `anchor` the R_anchor inside it; `tool` is 0 where `reward.tool` is off.

    `judged` is what the judge gave an open-ended answer where `reward.open_ended` is `judge` (`outcomes.score_all`).

    Raises:
        ValueError: the sample's right answer is none of its type, or a judgement is missing: such an episode has no
            reward, not reward 0.
    """
    reward = config.reward
    sample = episode.sample
    accurate = accuracy(episode.answer, sample.answer, sample.question_type, reward.open_ended, judged)
    formatted = score_format(episode, reward)
    tool = score_tool(episode, accurate) if reward.tool else 0.0
    return Rewards(
        total=accurate + reward.format_weight * formatted.format + tool,
        accuracy=accurate,
        format=formatted.format,
        anchor=formatted.anchor,
        tool=tool,
    )
