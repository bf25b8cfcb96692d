"""What is refused although its type is right: single values, and keys that do not go together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paravt_ray.config.schema import CHOICES, RANGES, SHIPPED_MODELS, Config, RewardConfig, ToolsConfig
from paravt_ray.errors import InputError
from paravt_ray.tools.offered import ToolNameError, load_tools

MODEL_TYPE = "qwen3_vl"
ASSETS = Path(__file__).parents[1] / "assets"


class ConfigError(InputError):
    """The configuration names an unknown key or holds a value that cannot be used; the message says which and why."""


def check_config(config: Config) -> None:
    """Refuse values that have the right type and still make no sense.

    Raises:
        ConfigError: naming the key, the value and what is allowed.
    """
    for key, choices in CHOICES.items():
        if (value := _get(config, key)) not in choices:
            raise ConfigError(f"{key} is '{value}', but must be one of: {', '.join(choices)}.")
    for key, (low, high) in RANGES.items():
        value = _get(config, key)
        if not ((low is None or value >= low) and (high is None or value <= high)):
            bounds = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ConfigError(f"{key} is {value}, but must be {bounds}.")
    budgets = config.rollout.frame_budgets
    if not budgets or min(budgets) < 1:
        raise ConfigError(f"rollout.frame_budgets is {budgets}, but must hold frame counts of at least 1.")
    if min(config.trainer.eval_budgets, default=1) < 1:
        raise ConfigError(
            f"trainer.eval_budgets is {config.trainer.eval_budgets}, but must hold frame counts of at least 1."
        )
    if min(config.paradox.temperatures, default=0.0) < 0:
        raise ConfigError(f"paradox.temperatures is {config.paradox.temperatures}, but must hold values of at least 0.")
    if config.rollout.min_group_size > config.rollout.group_size:
        raise ConfigError(
            f"rollout.min_group_size is {config.rollout.min_group_size}, more than rollout.group_size "
            f"({config.rollout.group_size}): no group could ever be complete."
        )
    _check_tools(config.tools)
    _check_judge(config.reward)
    if config.algorithm.kl_placement == "loss" and config.algorithm.kl_estimator == "k1":
        raise ConfigError(
            "algorithm.kl_estimator=k1 has no effect with algorithm.kl_placement=loss (its gradient is 0 in "
            "expectation); use k2 or k3, or place it in the reward."
        )
    if config.learner.zero_stage == 0 and config.model.dtype == "bfloat16":
        raise ConfigError(
            "learner.zero_stage=0 with model.dtype=bfloat16 would add up gradients in bfloat16; "
            "set learner.zero_stage to 1, 2 or 3, which keep them in float32."
        )
    if config.learner.zero_stage == 0 and config.learner.offload_optimizer:
        raise ConfigError("learner.offload_optimizer needs learner.zero_stage 1, 2 or 3.")
    if config.cluster.colocate:
        _check_colocation(config)


def _check_tools(tools: ToolsConfig) -> None:
    """Refuse what is no tool, and an empty list."""
    try:
        load_tools(tools.offered)
    except ToolNameError as error:
        raise ConfigError(f"tools.offered: {error}") from error
    if not tools.offered:
        raise ConfigError("tools.offered is empty: to offer no tool, set rollout.max_tool_turns=0.")


def _check_colocation(config: Config) -> None:
    """Refuse what cannot take turns on a GPU."""
    rollout, learner = config.rollout, config.learner
    if rollout.staleness:
        raise ConfigError(
            f"rollout.staleness is {rollout.staleness}, but must be 0 with cluster.colocate=true: generators cannot "
            "run ahead while the learner has their GPUs."
        )
    if rollout.tensor_parallel > 1:
        raise ConfigError(
            f"rollout.tensor_parallel is {rollout.tensor_parallel}, but must be 1 with cluster.colocate=true: an "
            "engine shares one GPU with one learner rank."
        )
    # Stage 0, and 1 in bfloat16, have no `offload_states`; that of 3 moves no optimizer state but FusedAdam's, and
    # takes frozen parameters for trained ones.
    third = learner.zero_stage == 3 and learner.offload_optimizer and not learner.lora_rank
    if learner.zero_stage != 2 and not third:
        raise ConfigError(
            "cluster.colocate=true needs learner.zero_stage=2, or 3 with learner.offload_optimizer=true and "
            "learner.lora_rank=0: DeepSpeed can take no other learner off a GPU for the time of the rollouts."
        )


def _check_judge(reward: RewardConfig) -> None:
    """Refuse a judge that cannot be asked, and an address that would carry a secret into logs and run directories."""
    for key in ("judge_url", "judge_model"):
        if reward.open_ended == "judge" and not getattr(reward, key):
            raise ConfigError(
                f"reward.open_ended=judge needs reward.{key}: give the address of an OpenAI-compatible endpoint "
                "(reward.judge_url=http://HOST:8000/v1) and the name of its model (reward.judge_model)."
            )
    if not reward.judge_url:
        return
    try:
        url = urlsplit(reward.judge_url)
        usable = url.scheme in ("http", "https") and bool(url.hostname) and (url.port is None or url.port > 0)
    except ValueError:  # a port or a bracketed host that is none
        usable = False
    if not usable or url.username is not None or url.query or url.fragment:
        # The value is not repeated: it may hold what should not be shown.
        raise ConfigError(
            "reward.judge_url must be a plain address like https://HOST/v1, without user name, password or query: "
            "a key belongs into the environment variable JUDGE_API_KEY."
        )


def model_directory(config: Config) -> Path:
    """The checkpoint directory that `model.path` names.

    Raises:
        ConfigError: there is no checkpoint of the Qwen3-VL family in Hugging Face format.
    """
    name = config.model.path
    directory = ASSETS / name if name in SHIPPED_MODELS else Path(name)
    file = directory / "config.json"
    if not file.is_file():
        raise ConfigError(
            f"There is no checkpoint at model.path={config.model.path}: {file} is missing. Give the directory of a "
            f"Qwen3-VL in Hugging Face format, or one of {', '.join(SHIPPED_MODELS)}."
        )
    try:
        kind = json.loads(file.read_text(encoding="utf-8"))["model_type"]
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{file} is no configuration of a model in Hugging Face format.") from error
    if kind != MODEL_TYPE:
        raise ConfigError(
            f"model.path={config.model.path} holds a model of type {kind}; only {MODEL_TYPE} is supported."
        )
    return directory.absolute()


def _get(config: Config, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)
