"""What is run, in which order, and where it goes on: cold starts are measured, then every arm is run, seed by seed.

TRAINER.RUN_DIR/cold_start/strong/mechanism.jsonl    measured before the first run
TRAINER.RUN_DIR/ARM/seed_0/                          an ordinary run directory each
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paravt_ray.config import Config, config_items, load_config, model_directory
from paravt_ray.errors import InputError, UserError
from paravt_ray.evaluation.results import model_digest
from paravt_ray.learner.checkpoint import MODEL, latest_complete
from paravt_ray.paradox import arms
from paravt_ray.paradox.arms import ARMS, Arm
from paravt_ray.paradox.draw import draw
from paravt_ray.paradox.mechanism import read_records, write_records
from paravt_ray.paradox.results import MECHANISM_FILE, RUNS
from paravt_ray.report.source import read_run
from paravt_ray.tracking.progress import Progress
from paravt_ray.tracking.run_dir import METRICS_FILE, RunDir, read_metrics, step_of

SHORT = {"steps": "trainer.steps", "seeds": "paradox.seeds"}
LOOK = "outputs/paradox-look"
"""Where runs go that are begun with one of the short names."""
COMMITTED = ("config.yaml", METRICS_FILE)
POLL_S = 2.0
STOP_S = 60.0
"""Seconds that a run is given to end in good order."""


class ParadoxError(UserError):
    """An arm's run failed; the message says which and why."""


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
            raise InputError(f"{file} must name data.train and data.valid: every arm is evaluated on held-out questions.")
        plan = cls(file, full, config)
        for prior in plan.priors():
            model_directory(plan.settings(next(arm for arm in ARMS if arm.prior == prior), config.trainer.seed))
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
        path = self.run_dir(arm, seed)
        lines, checkpoint = read_metrics(path / METRICS_FILE), latest_complete(path / "checkpoints")
        logged = int(lines[-1]["step"]) if lines else 0
        return min(logged, step_of(checkpoint) or 0) if checkpoint is not None else logged

    def is_finished(self, arm: Arm, seed: int) -> bool:
        """Whether nothing is left to do."""
        return self.steps_done(arm, seed) == self.config.trainer.steps

    def check_begun(self, arm: Arm, seed: int) -> None:
        """Refuse to go on with a run that was begun otherwise.

        Raises:
            InputError: its settings are others, or it has more steps.
        """
        path = self.run_dir(arm, seed)
        if (path / "config.yaml").is_file():
            begun = arms.shared(read_run(path).config, arm)
            planned = arms.shared(config_items(self.settings(arm, seed)), arm)
            if begun.pop("trainer.steps", 0) > planned["trainer.steps"]:
                raise InputError(f"{path} was begun with more steps. Choose another trainer.run_dir, or remove it.")
            arms.check_same(begun, planned, (str(path), "this comparison"))


def run(plan: Plan) -> int:
    """Measure, run and draw what is missing; whatever is finished is skipped.

    Raises:
        UserError: a run failed, or a folder holds something else.
    """
    runs, steps = plan.runs(), plan.config.trainer.steps
    for arm, seed in runs:
        plan.check_begun(arm, seed)
    trained = [(arm, seed) for arm, seed in runs if not arm.checkpoint_of]
    left = [pair for pair in runs if not plan.is_finished(*pair)]
    with Progress(steps * len(trained)) as progress:
        progress.say(f"{len(runs)} runs of {steps} steps in {plan.folder}; {len(runs) - len(left)} are finished.")
        if not plan.config.paradox.weak_model:
            progress.say("The contrast of priors is left out: paradox.weak_model names no checkpoint.")
        for prior in plan.priors():
            _measure(plan, prior, progress)
        publish(plan)
        started = time.monotonic()
        for number, (arm, seed) in enumerate(left, start=1):
            progress.stage(f"{arm.label}, seed {seed}", f"run {number} of {len(left)}")
            if arm.checkpoint_of:
                _evaluate(plan, arm, seed)
            else:
                before = sum(plan.steps_done(*pair) for pair in trained if pair != (arm, seed))
                train(plan.arguments(arm, seed), plan.run_dir(arm, seed), progress, before)
            publish(plan)
            hours = (time.monotonic() - started) / number * (len(left) - number) / 3600
            progress.say(f"{arm.label}, seed {seed} is done; {len(left) - number} runs left, about {hours:.1f} h.")
        progress.say(f"Figures and tables are in {plan.output}.")
    return 0


def _measure(plan: Plan, prior: str, progress: Progress) -> None:
    """Measure a cold start unless that is done.

    Raises:
        InputError: it was done with another checkpoint.
    """
    from paravt_ray.paradox.measure import measure

    arm = next(arm for arm in ARMS if arm.prior == prior)  # GRPO
    config = plan.settings(arm, plan.config.trainer.seed)
    config.trainer.run_dir = str(plan.folder / "cold_start" / prior)
    file = Path(config.trainer.run_dir) / MECHANISM_FILE
    if file.is_file():
        if read_records(file)[0].model != model_digest(model_directory(config)):
            raise InputError(f"{plan.folder} was begun with another checkpoint. Choose another trainer.run_dir.")
        return
    progress.stage(f"measuring the {prior} prior", "a few minutes")
    with RunDir(config) as held:
        write_records(file, measure(config, prior, held, progress.stage))


def _evaluate(plan: Plan, arm: Arm, seed: int) -> None:
    """Evaluate another arm's last checkpoint.

    Raises:
        InputError: that checkpoint is gone.
    """
    from paravt_ray.paradox.measure import evaluate_checkpoint

    source = plan.run_dir(arms.BY_NAME[arm.checkpoint_of], seed)
    checkpoint = latest_complete(source / "checkpoints")
    if checkpoint is None or step_of(checkpoint) != plan.config.trainer.steps:
        raise InputError(f"{source} has no checkpoint of its last step any more. Remove it, and it is run again.")
    config = plan.settings(arm, seed)
    with RunDir(config) as held:
        evaluate_checkpoint(config, checkpoint / MODEL, held)


def train(arguments: Sequence[str], run_dir: Path, progress: Progress, before: int) -> None:
    """Run `paravt train` to its end and show its steps; it ends with this process, however that ends.

    Args:
        arguments: its arguments.
        run_dir: its run directory.
        progress: shows the steps.
        before: steps that all other runs have done.

    Raises:
        ParadoxError: it ended with another exit code than 0.
    """
    import os

    screen, metrics = run_dir / "logs" / "screen.log", run_dir / METRICS_FILE
    screen.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "paravt_ray.paradox.child", str(os.getpid()), *arguments]
    shown = max((line["step"] for line in read_metrics(metrics)), default=0)
    with screen.open("ab") as output:
        # In a session of its own: Ctrl-C reaches this process, which then ends the run in good order.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        running = True
        while running:
            running = process.poll() is None
            for line in read_metrics(metrics):
                if line["step"] > shown:
                    shown = line["step"]
                    progress.step(before + shown, line)
            time.sleep(POLL_S if running else 0)
    finally:
        _stop(process)
    if process.returncode:
        last = [line.strip() for line in screen.read_text(errors="replace").splitlines() if line.strip()][-3:]
        raise ParadoxError(
            f"The run in {run_dir} ended with exit code {process.returncode}: {' '.join(last)}\n"
            f"Everything it said is in {screen}. The same command goes on from its last checkpoint."
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def publish(plan: Plan) -> None:
    """Copy what the figures are drawn from out of the finished runs, and draw them."""
    records = []
    for prior in plan.priors():
        records += read_records(plan.folder / "cold_start" / prior / MECHANISM_FILE)
    plan.output.mkdir(parents=True, exist_ok=True)
    write_records(plan.output / MECHANISM_FILE, records)
    for arm in ARMS:
        shutil.rmtree(plan.output / RUNS / arm.name, ignore_errors=True)
    finished = [pair for pair in plan.runs() if plan.is_finished(*pair)]
    for arm, seed in finished:
        target = plan.output / RUNS / arm.name / f"seed_{seed}"
        target.mkdir(parents=True)
        for name in COMMITTED:
            shutil.copyfile(plan.run_dir(arm, seed) / name, target / name)
    if finished:
        draw(plan.output)
