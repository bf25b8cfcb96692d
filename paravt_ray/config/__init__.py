"""The typed configuration: every key, its meaning and its default. Unknown keys and bad values are refused by name.

A run is described by one YAML file and `key=value` overrides: `load_config("configs/debug.yaml", ["trainer.seed=2"])`.
A file may name another one that it is based on, and holds then only what differs: `base: paragrpo_8b.yaml`.
"""

from paravt_ray.config.check import ConfigError, check_config, model_directory
from paravt_ray.config.load import config_items, load_config, save_config
from paravt_ray.config.schema import (
    AlgorithmConfig,
    ClusterConfig,
    Config,
    DataConfig,
    EvalConfig,
    LearnerConfig,
    ModelConfig,
    ParadoxConfig,
    RewardConfig,
    RolloutConfig,
    SftConfig,
    ToolsConfig,
    TrackingConfig,
    TrainerConfig,
)

__all__ = [
    "AlgorithmConfig",
    "ClusterConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "EvalConfig",
    "LearnerConfig",
    "ModelConfig",
    "ParadoxConfig",
    "RewardConfig",
    "RolloutConfig",
    "SftConfig",
    "ToolsConfig",
    "TrackingConfig",
    "TrainerConfig",
    "check_config",
    "config_items",
    "load_config",
    "model_directory",
    "save_config",
]
