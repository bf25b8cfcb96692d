"""From scored groups to the rows that the learner trains on: one for each trajectory, with an advantage per token."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from paravt_ray.algorithm.advantages import EpisodeAdvantages, episode_advantages
from paravt_ray.algorithm.anchoring import TokenText, structural_mask, token_advantages
from paravt_ray.algorithm.kl import kl_estimate
from paravt_ray.chat import Chat
from paravt_ray.config import Config
from paravt_ray.episode import Episode, Group, TrainRow, Trajectory
from paravt_ray.parsing import STRUCTURAL_TAGS


def build_rows(groups: Sequence[Group], config: Config) -> list[TrainRow]:
    """Rows of all episodes in order: the main agent's, then (`rollout.train_subagents`) its sub-agents'.

    Their advantages are 0 until `set_advantages`; `sequence_index` is the episode's position in the batch.
    """
    rows = []
    position = 0
    for group_index, group in enumerate(groups):
        for episode in group.episodes:
            rows += [TrainRow.of(t, group_index, position) for t in trained_trajectories(episode, config)]
            position += 1
    return rows


def trained_trajectories(episode: Episode, config: Config) -> list[Trajectory]:
    """The main agent's trajectory, then each sub-agent's once (duplicate calls share theirs)."""
    subagents: dict[int, Trajectory] = {}
    if config.rollout.train_subagents:
        for record in episode.call_records:
            if record.subagent is not None:
                subagents.setdefault(id(record.subagent), record.subagent)
    return [episode.trajectory, *subagents.values()]


def set_advantages(rows: Sequence[TrainRow], groups: Sequence[Group], chat: Chat, config: Config) -> None:
    """Give every token of `rows` its advantage.

    A sub-agent's tokens carry their episode's sequence advantage: its summary was worth what the answer was worth.

    Args:
        rows: from `build_rows`, with `reference_logprobs` where the KL penalty is part of the reward.
        groups: the same, with every episode scored.
        chat: of the model that generated them.
        config: the run's.

    Raises:
        ValueError: an episode has no rewards.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    advantages = _advantages(episodes, config, kl_penalties(rows, len(episodes), config))
    token_text = _token_text(chat)
    seen: set[int] = set()
    for row in rows:
        position = row.sequence_index
        is_main, tags = position not in seen, np.zeros(len(row.token_ids), dtype=np.bool_)
        seen.add(position)
        if is_main:
            tags = structural_mask(row.token_ids, row.generated, token_text, STRUCTURAL_TAGS, [chat.im_end])
        sequence, anchoring = float(advantages.sequence[position]), float(advantages.format[position])
        row.advantages = token_advantages(row.generated, tags, sequence, anchoring)


def has_signal(group: Group, config: Config) -> bool:
    """Whether the rewards of a group say anything: with equal rewards all advantages are 0, but for the KL penalty's.

    In scope `structural`, equal totals of different parts do say something: each part has its own advantage.

    Raises:
        ValueError: an episode has no rewards.
    """
    advantages = _advantages(group.episodes, config)
    return bool(advantages.sequence.any() or advantages.format.any())


def _advantages(
    episodes: Sequence[Episode], config: Config, penalties: Sequence[float] | None = None
) -> EpisodeAdvantages:
    task, fmt = [], []
    for episode in episodes:
        if episode.rewards is None:
            raise ValueError(f"Episode {episode.index} of group {episode.group_id} was never scored.")
        task.append(episode.rewards.accuracy + episode.rewards.tool)
        fmt.append(episode.rewards.format)
    group_ids, weight = [episode.group_id for episode in episodes], config.reward.format_weight
    return episode_advantages(task, fmt, group_ids, config.algorithm, format_weight=weight, penalties=penalties)


def kl_penalties(rows: Sequence[TrainRow], episodes: int, config: Config) -> list[float]:
    """Each episode's KL penalty: the coefficient times its KL estimate, summed over its sampled tokens."""
    penalties = [0.0] * episodes
    if config.algorithm.kl_placement == "reward" and config.algorithm.kl_coefficient > 0:
        for row in rows:
            assert row.reference_logprobs is not None, "the reference policy was not asked"
            sampled, reference = torch.from_numpy(row.behaviour_logprobs), torch.from_numpy(row.reference_logprobs)
            kl = kl_estimate(sampled, reference, config.algorithm.kl_estimator)[torch.from_numpy(row.generated)]
            penalties[row.sequence_index] += config.algorithm.kl_coefficient * float(kl.sum())
    return penalties


def _token_text(chat: Chat) -> TokenText:
    @cache
    def text(token: int) -> str:
        return chat.decode([token])

    return text
