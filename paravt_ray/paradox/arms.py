"""The arms of the comparison: what each switches, and that nothing else differs between their runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from paravt_ray.errors import InputError
from paravt_ray.report.seeds import Settings, difference, trained_with

ANCHORED: Settings = {
    "rollout.think_prefix": True,
    "reward.answer_suffix": True,
    "reward.anchor_weight": 0.5,
    "algorithm.anchoring_scope": "structural",
}
"""Exploration Anchoring."""
NOT_ANCHORED: Settings = {
    "rollout.think_prefix": False,
    "reward.answer_suffix": False,
    "reward.anchor_weight": 0.0,
    "algorithm.anchoring_scope": "all",
}
PARA_GRPO: Settings = {
    **ANCHORED,
    "rollout.gating": True,
    "reward.tool": True,
    "reward.unclosed_penalty": 0.3,
    "rollout.dispatch": "parallel",
}
GRPO: Settings = {**PARA_GRPO, **NOT_ANCHORED, "rollout.gating": False}


@dataclass(frozen=True)
class Arm:
    """One way to train; its runs differ in the seed alone."""

    name: str
    """Folder of its runs."""
    label: str
    settings: Settings
    """Every key that any arm switches, so that nothing is left to a default."""
    prior: Literal["strong", "weak"] = "strong"
    """The cold start: `model.path`, or `paradox.weak_model`."""
    checkpoint_of: str = ""
    """Not trained: evaluates the last checkpoint of this arm."""

    def overrides(self) -> list[str]:
        """The settings as `key=value`."""
        return [f"{key}={str(value).lower()}" for key, value in self.settings.items()]


ARMS = (
    Arm("grpo", "GRPO", GRPO),
    Arm("anchoring", "+ Exploration Anchoring", {**PARA_GRPO, "rollout.gating": False}),
    Arm("gating", "+ nFrames Gating", {**PARA_GRPO, **NOT_ANCHORED}),
    Arm("para_grpo", "PARA-GRPO", PARA_GRPO),
    Arm(
        "sequential", "sequential dispatch", {**PARA_GRPO, "rollout.dispatch": "sequential"}, checkpoint_of="para_grpo"
    ),
    Arm("no_tool_reward", "− R_tool", {**PARA_GRPO, "reward.tool": False}),
    Arm("no_unclosed_penalty", "− gamma", {**PARA_GRPO, "reward.unclosed_penalty": 0.0}),
    Arm("anchor_all", "anchoring scope `all`", {**PARA_GRPO, "algorithm.anchoring_scope": "all"}),
    Arm("weak_grpo", "GRPO, weak prior", GRPO, prior="weak"),
    Arm("weak_para_grpo", "PARA-GRPO, weak prior", PARA_GRPO, prior="weak"),
)
"""In the order in which they are run and listed. `model.path` is the strong prior."""
BY_NAME = {arm.name: arm for arm in ARMS}
FIGURE = ("grpo", "anchoring", "gating", "para_grpo")
"""The four curves of the paper's figure."""
CONTRAST = ("grpo", "para_grpo", "weak_grpo", "weak_para_grpo")


def plain_arm(prior: str) -> Arm:
    """The arm that samples a cold start without any aid: GRPO."""
    return next(arm for arm in ARMS if arm.prior == prior and arm.settings == GRPO)


def refuse_switches(keys: Iterable[str]) -> None:
    """Refuse settings of what the arms switch.

    Raises:
        InputError: naming the first such key.
    """
    for key in keys:
        if key in PARA_GRPO or key == "trainer.resume":
            raise InputError(f"{key} is set by `paravt paradox` itself: leave it out.")


def shared(config: Settings, arm: Arm) -> dict[str, Any]:
    """What has to be the same in all runs of the comparison: what is in all seeds of an arm, but for the switches.

    The model has its prior in its name; where it is another arm's checkpoint, it is left out.
    """
    kept = {key: value for key, value in trained_with(config).items() if key not in PARA_GRPO}
    model = kept.pop("model.path", None)
    return kept if arm.checkpoint_of else kept | {f"model.path ({arm.prior} prior)": model}


def check_same(one: Settings, other: Settings, names: tuple[str, str]) -> None:
    """Refuse two runs whose shared settings differ in a key that both have.

    Args:
        one: `shared` settings.
        other: likewise.
        names: of the two, for the message.

    Raises:
        InputError: naming what differs.
    """
    if different := difference(one, other):
        raise InputError(
            f"{names[0]} and {names[1]} do not belong to one comparison ({different}). "
            f"Remove the older one, or begin the comparison in another folder."
        )
