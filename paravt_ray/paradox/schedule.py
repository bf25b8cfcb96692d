"""`paravt paradox`: cold starts are measured, then every arm is run, seed by seed; what is finished is skipped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from paravt_ray.config import model_directory
from paravt_ray.errors import InputError, UserError
from paravt_ray.learner.checkpoint import MODEL, latest_complete
from paravt_ray.paradox import arms
from paravt_ray.paradox.arms import Arm
from paravt_ray.paradox.mechanism import read_records, write_records
from paravt_ray.paradox.plan import Plan, check_begun
from paravt_ray.paradox.records import mechanism_file, publish, restore
from paravt_ray.tracking.progress import Progress
from paravt_ray.tracking.run_dir import METRICS_FILE, RunDir, read_metrics, step_of
from paravt_ray.weights.digest import model_digest

POLL_S = 2.0
STOP_S = 60.0
"""Seconds that a run is given to end in good order."""


class ParadoxError(UserError):
    """An arm's run failed; the message says which and why."""


def run(plan: Plan) -> int:
    """Measure, run and draw what is missing; whatever is finished is skipped.

    Raises:
        UserError: a run failed, or a folder holds something else.
    """
    runs, steps = plan.runs(), plan.config.trainer.steps
    restored = restore(plan)
    for arm, seed in runs:
        check_begun(plan.settings(arm, seed), arm)
    trained = [(arm, seed) for arm, seed in runs if not arm.checkpoint_of]
    left = [pair for pair in runs if not plan.is_finished(*pair)]
    with Progress(steps * len(trained)) as progress:
        progress.say(f"{len(runs)} runs of {steps} steps in {plan.folder}; {len(runs) - len(left)} are finished.")
        if restored:
            progress.say(f"{restored} of them are known by their records in {plan.output} alone.")
        if not plan.config.paradox.weak_model:
            progress.say("The contrast of priors is left out: paradox.weak_model names no checkpoint.")
        for prior in plan.priors():
            _measure(plan, prior, progress)
        publish(plan)
        started = time.monotonic()
        for number, (arm, seed) in enumerate(left, start=1):
            name = f"run {number} of {len(left)}: {arm.label}, seed {seed}"
            progress.stage(name)
            if arm.checkpoint_of:
                _evaluate(plan, arm, seed)
            else:
                before = sum(plan.steps_done(*pair) for pair in trained if pair != (arm, seed))
                train(plan.arguments(arm, seed), plan.run_dir(arm, seed), progress, before, name)
            publish(plan)
            hours = (time.monotonic() - started) / number * (len(left) - number) / 3600
            progress.say(f"Done: {name}. About {hours:.1f} h left.")
        progress.say(f"Figures and tables are in {plan.output}.")
    return 0


def _measure(plan: Plan, prior: str, progress: Progress) -> None:
    """Measure a cold start unless that is done.

    Raises:
        InputError: it was done with another checkpoint.
    """
    from paravt_ray.paradox.measure import measure

    arm = arms.plain_arm(prior)
    config = plan.settings(arm, plan.config.trainer.seed)
    config.trainer.run_dir = str(plan.folder / "cold_start" / prior)
    check_begun(config, arm)
    file = mechanism_file(plan, prior)
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


def train(arguments: Sequence[str], run_dir: Path, progress: Progress, before: int, name: str) -> None:
    """Run `paravt train` to its end and show its steps; it ends with this process, however that ends.

    Args:
        arguments: its arguments.
        run_dir: its run directory.
        progress: shows the steps.
        before: steps that all other runs have done.
        name: for people.

    Raises:
        ParadoxError: it ended with another exit code than 0.
    """
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
                    progress.stage(name)
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
