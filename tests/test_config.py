"""Configuration: what is accepted, what is refused, and that a refusal names the key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from paravt_ray.config import Config, ConfigError, config_items, load_config, save_config
from paravt_ray.paradox.arms import ARMS, BY_NAME, PARA_GRPO

FOLDER = Path(__file__).parent.parent / "configs"
CONFIGS = sorted(FOLDER.glob("**/*.yaml"))
ABLATIONS = sorted(FOLDER.glob("ablations/*.yaml"))


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
        ("trainer.steps=many", r"trainer\.steps must be a whole number: .*'many'"),
        ("trainer.steps=1.5", r"trainer\.steps must be a whole number: .*1\.5"),
        ("trainer.steps=${nonsense}", r"trainer\.steps must be a whole number: .*nonsense"),
        ("trainer.steps=0", r"trainer\.steps is 0, but must be at least 1"),
        ("trainer.steps=null", r"trainer\.steps must be a whole number: "),
        ("trainer=5", r"trainer is a section, so it cannot be '5'"),
        ("rollout.think_prefix=perhaps", r"rollout\.think_prefix must be true or false: .*'perhaps'"),
        ("rollout.dispatch=both", r"rollout\.dispatch is 'both', but must be one of: parallel, sequential"),
        ("rollout.temperature=nan", r"rollout\.temperature is nan"),
        ("rollout.temperature=0", r"rollout\.temperature is 0"),
        ("rollout.frame_budgets=[]", r"rollout\.frame_budgets"),
        ("rollout.frame_budgets=[0,4]", r"rollout\.frame_budgets"),
        ("rollout.frame_budgets=4", r"rollout\.frame_budgets must be a list like \[4, 8, 16"),
        ("rollout.frame_budgets=[4,many]", r"rollout\.frame_budgets must be a list like .*'many'"),
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


def test_a_file_holds_what_differs_from_its_base(tmp_path: Path) -> None:
    (tmp_path / "variants").mkdir()
    (tmp_path / "low.yaml").write_text("trainer: {steps: 3, seed: 4}\nrollout: {frame_budgets: [1, 2, 3]}\n")
    (tmp_path / "middle.yaml").write_text("base: low.yaml\ntrainer: {steps: 5}\n")
    file = tmp_path / "variants" / "top.yaml"
    file.write_text("base: ../middle.yaml\nrollout: {frame_budgets: [8]}\n")
    config = load_config(file, ["trainer.seed=6"])
    assert (config.trainer.steps, config.trainer.seed, config.rollout.frame_budgets) == (5, 6, [8])
    save_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config, "what a run keeps does not depend on other files"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: none.yaml\n", r"top\.yaml is based on .*none\.yaml, which does not exist"),
        ("base: top.yaml\n", "which is based on itself"),
        ("base: round.yaml\n", "which is based on itself"),
        ("base:\n", "must name the file that it is based on"),
        ("base: {trainer: 3}\n", "must name the file that it is based on"),
        ("base: typo.yaml\n", r"Unknown configuration key trainer\.stepps"),
        ("trainer: {base: typo.yaml}\n", r"Unknown configuration key trainer\.base"),
    ],
)
def test_a_base_that_cannot_be_used_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "round.yaml").write_text("base: top.yaml\n")
    (tmp_path / "typo.yaml").write_text("trainer: {stepps: 3}\n")
    (tmp_path / "top.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "top.yaml")


def test_a_base_is_named_in_a_file_and_nowhere_else(file: Path) -> None:
    with pytest.raises(ConfigError, match="Unknown configuration key base"):
        load_config(file, [f"base={file}"])


# The files that are shipped


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_files_load(path: Path) -> None:
    load_config(path)


@pytest.mark.parametrize("path", [*ABLATIONS, FOLDER / "vanilla_grpo_8b.yaml"], ids=lambda path: path.stem)
def test_a_variant_differs_in_what_its_arm_switches_alone(path: Path) -> None:
    """The 8B files switch what the arms of `paravt paradox` switch; a stray key would spoil the comparison."""
    arm = BY_NAME["grpo" if path.stem == "vanilla_grpo_8b" else path.stem]
    full, variant = (config_items(load_config(file)) for file in (FOLDER / "paragrpo_8b.yaml", path))
    switched = {key: value for key, value in arm.settings.items() if PARA_GRPO[key] != value}
    differing = {key: value for key, value in variant.items() if value != full[key]}
    run_dir = differing.pop("trainer.run_dir")
    assert differing == switched
    assert path.stem in run_dir, "variants must not share a run directory"


def test_there_is_a_file_for_each_ablation() -> None:
    strong = {arm.name for arm in ARMS if arm.prior == "strong"}
    assert {path.stem for path in ABLATIONS} == strong - {"grpo", "para_grpo"}
    assert len(ABLATIONS) == 6


def test_the_cold_start_leaves_its_model_where_rl_begins() -> None:
    cold_start, full = load_config(FOLDER / "sft_8b.yaml"), load_config(FOLDER / "paragrpo_8b.yaml")
    assert cold_start.sft.output == full.model.path


def test_all_keys_have_a_section() -> None:
    assert all(key.count(".") == 1 for key in config_items(Config()))


def test_every_configuration_that_is_named_exists() -> None:
    """Documents and cluster files must not send people to a file that is not there or that is refused."""
    root = Path(__file__).parent.parent
    texts = [*root.glob("docs/*.md"), *root.glob("cluster/*"), root / "README.md", root / "Makefile"]
    named = {name for text in texts for name in re.findall(r"configs/[\w/]+\.yaml", text.read_text(encoding="utf-8"))}
    assert named
    for name in sorted(named):
        load_config(root / name)
