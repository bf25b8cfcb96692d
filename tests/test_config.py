"""Configuration: what is accepted, what is refused, and that a refusal names the key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paravt_ray.config import Config, ConfigError, config_items, load_config, save_config

CONFIGS = sorted((Path(__file__).parent.parent / "configs").glob("**/*.yaml"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("data:\n  train: x.parquet\ntrainer:\n  steps: 7\n")
    return path


def test_file_then_overrides(file: Path) -> None:
    config = load_config(
        file, ["trainer.seed=3", "trainer.steps=9", "rollout.frame_budgets=[2,4]", "model.path=/m/x=1"]
    )
    assert (config.trainer.steps, config.trainer.seed, config.data.train) == (9, 3, "x.parquet")
    assert config.rollout.frame_budgets == [2, 4]
    assert config.model.path == "/m/x=1"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.step=3", r"Unknown configuration key trainer\.step\. Did you mean trainer\.steps\?"),
        ("steps=3", r"Unknown configuration key steps\. Did you mean sft\.steps or trainer\.steps\?"),
        ("nonsense.key=3", r"Unknown configuration key nonsense"),
        ("trainer.steps=many", r"trainer\.steps"),
        ("trainer.steps=1.5", r"trainer\.steps"),
        ("trainer.steps=0", r"trainer\.steps is 0, but must be at least 1"),
        ("trainer.steps=null", r"trainer\.steps"),
        ("trainer=5", r"trainer is a section, so it cannot be '5'"),
        ("rollout.think_prefix=perhaps", r"rollout\.think_prefix"),
        ("rollout.dispatch=both", r"rollout\.dispatch is 'both', but must be one of: parallel, sequential"),
        ("rollout.temperature=nan", r"rollout\.temperature is nan"),
        ("rollout.temperature=0", r"rollout\.temperature is 0"),
        ("rollout.frame_budgets=[]", r"rollout\.frame_budgets"),
        ("rollout.frame_budgets=[0,4]", r"rollout\.frame_budgets"),
        ("rollout.frame_budgets=4", r"rollout\.frame_budgets"),
        ("rollout.min_group_size=9", r"rollout\.min_group_size is 9, more than rollout\.group_size"),
        ("data.max_unusable=1.5", r"data\.max_unusable is 1.5, but must be between 0 and 1"),
        ("trainer.seed", r"'trainer.seed' is not an override: write it as key=value"),
        ("trainer.steps=[1", r"The value in 'trainer\.steps=\[1' is not readable"),
    ],
)
def test_refusals_name_the_key(file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        load_config(file, [override])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trainer:\n  stepps: 3\n", r"Unknown configuration key trainer\.stepps"),
        ("trainer:\n  steps: [1\n", "not readable as YAML"),
        ("- a\n- b\n", "must hold sections"),
        ("just text", "Unknown configuration key just text"),
        ("trainer: 5\n", "trainer is a section"),
        ("trainer:\n", "trainer is a section"),
    ],
)
def test_bad_files_are_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").touch()
    assert load_config(tmp_path / "empty.yaml") == Config()


def test_a_text_can_be_emptied(file: Path) -> None:
    assert load_config(file, ["data.train="]).data.train == ""


def test_a_missing_or_unreadable_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no configuration file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "binary.yaml").write_bytes(bytes(range(256)))
    with pytest.raises(ConfigError, match="not readable as YAML"):
        load_config(tmp_path / "binary.yaml")


def test_the_resolved_file_gives_the_same_run(file: Path, tmp_path: Path) -> None:
    config = load_config(file, ["trainer.seed=3", "rollout.frame_budgets=[2]"])
    save_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_files_load(path: Path) -> None:
    load_config(path)


def test_all_keys_have_a_section() -> None:
    assert all(key.count(".") == 1 for key in config_items(Config()))


def test_every_configuration_that_is_named_exists() -> None:
    """Documents and cluster files must not send people to a file that is not there or that is refused."""
    root = Path(__file__).parent.parent
    texts = [*root.glob("docs/*.md"), *root.glob("cluster/*"), root / "README.md", root / "Makefile"]
    named = {name for text in texts for name in re.findall(r"configs/\w+\.yaml", text.read_text(encoding="utf-8"))}
    assert named
    for name in sorted(named | {f"configs/{file.name}" for file in root.glob("configs/*.yaml")}):
        load_config(root / name)
