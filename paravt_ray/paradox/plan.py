"""The comparison as configured: which runs there are, where each goes, with which settings, and how far it is.

TRAINER.RUN_DIR/cold_start/strong/mechanism.jsonl    measured before the first run
TRAINER.RUN_DIR/ARM/seed_0/                          an ordinary run directory each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paravt_ray.config import Config, config_items, load_config, model_directory
from paravt_ray.errors import InputError
from paravt_ray.paradox import arms
from paravt_ray.paradox.arms import ARMS, Arm
from paravt_ray.report.source import read_run
from paravt_ray.tracking.run_dir import METRICS_FILE, read_metrics, step_of

SHORT = {"steps": "trainer.steps", "seeds": "paradox.seeds"}
LOOK = "outputs/paradox-look"
"""Where runs go that are begun with one of the short names."""


@dataclass(frozen=True)
class Plan:
    """The whole comparison."""

    file: str
    overrides: list[str]
    config: Config
    """Without the arms' settings."""

    @classmethod
    def load(cls, file: str, overrides: Sequence[str]) -> Plan:
        """Read the configuration; `steps=4` and `seeds=1` are short names, and mean a quick look in its own folder.

        Raises:
            InputError: a value cannot be used, or a key is one that the arms switch.
        """
        pairs = [override.partition("=") for override in overrides]
        look = [f"trainer.run_dir={LOOK}"] if any(key in SHORT for key, _, _ in pairs) else []
        full = [*look, *(f"{SHORT.get(key, key)}{equals}{value}" for key, equals, value in pairs)]
        arms.refuse_switches(override.partition("=")[0] for override in full)
        config = load_config(file, full)
        if not (config.data.train and config.data.valid):
            raise InputError(
                f"{file} must name data.train and data.valid: every arm is evaluated on held-out questions."
            )
        plan = cls(file, full, config)
        for prior in plan.priors():
            model_directory(plan.settings(arms.plain_arm(prior), config.trainer.seed))
        return plan

    @property
    def folder(self) -> Path:
        """Of all runs."""
        return Path(self.config.trainer.run_dir)

    @property
    def output(self) -> Path:
        """Of figures and tables."""
        return Path(self.config.paradox.output or self.folder / "comparison")

    def priors(self) -> list[str]:
        """The cold starts that there are."""
        return ["strong", "weak"] if self.config.paradox.weak_model else ["strong"]

    def runs(self) -> list[tuple[Arm, int]]:
        """All runs with their seeds: every arm once, then every arm with the next seed."""
        first, chosen = self.config.trainer.seed, [arm for arm in ARMS if arm.prior in self.priors()]
        return [(arm, seed) for seed in range(first, first + self.config.paradox.seeds) for arm in chosen]

    def arguments(self, arm: Arm, seed: int) -> list[str]:
        """What `paravt train` is given."""
        model = [f"model.path={self.config.paradox.weak_model}"] if arm.prior == "weak" else []
        own = [f"trainer.seed={seed}", "trainer.resume=auto", f"trainer.run_dir={self.run_dir(arm, seed)}"]
        return [self.file, *self.overrides, *arm.overrides(), *model, *own]

    def settings(self, arm: Arm, seed: int) -> Config:
        """The same, resolved."""
        file, *overrides = self.arguments(arm, seed)
        return load_config(file, overrides)

    def run_dir(self, arm: Arm, seed: int) -> Path:
        """Where a run goes."""
        return self.folder / arm.name / f"seed_{seed}"

    def steps_done(self, arm: Arm, seed: int) -> int:
        """Steps after which the run goes on; all of them where it is finished, also if its checkpoints are gone."""
        from paravt_ray.learner.checkpoint import latest_complete

        path = self.run_dir(arm, seed)
        lines, checkpoint = read_metrics(path / METRICS_FILE), latest_complete(path / "checkpoints")
        logged = int(lines[-1]["step"]) if lines else 0
        return min(logged, step_of(checkpoint) or 0) if checkpoint is not None else logged

    def is_finished(self, arm: Arm, seed: int) -> bool:
        """Whether nothing is left to do."""
        return self.steps_done(arm, seed) == self.config.trainer.steps


def check_begun(config: Config, arm: Arm) -> None:
    """Refuse to go on in a run directory that was begun otherwise.

    Raises:
        InputError: its settings are others, or it has more steps.
    """
    path = Path(config.trainer.run_dir)
    if (path / "config.yaml").is_file():
        begun, planned = arms.shared(read_run(path).config, arm), arms.shared(config_items(config), arm)
        if begun.pop("trainer.steps", 0) > config.trainer.steps:
            raise InputError(f"{path} was begun with more steps. Choose another trainer.run_dir, or remove it.")
        arms.check_same(begun, planned, (str(path), "this comparison"))
