"""`make mlflow`: what people look for is at hand on MLflow's own page, in a real browser."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from browser import Browser
from mlflow import MlflowClient
from waiting import answers, wait_for

from paravt_ray.config import Config
from paravt_ray.tracking.mlflow_log import MlflowLogger
from paravt_ray.tracking.run_dir import RunDir

SCRIPT = Path(__file__).parent.parent / "cluster" / "mlflow.sh"


@pytest.mark.slow
def test_format_reward_and_call_rate_are_on_the_dashboard(browser: Browser, tmp_path: Path, database: Path) -> None:
    config = Config()
    config.trainer.run_dir = str(tmp_path / "run")
    with RunDir(config) as run, MlflowLogger(run, config):
        for step in range(1, 9):
            run.log_metrics(step, {"reward/format": step / 8, "tool/call_rate": 1 - step / 8})
    run_id = json.loads((tmp_path / "run" / "mlflow.json").read_text(encoding="utf-8"))["run_id"]
    experiment = MlflowClient(f"sqlite:///{database}").get_run(run_id).info.experiment_id
    with subprocess.Popen(
        [SCRIPT, database], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as server:
        try:
            assert server.stdout is not None
            address = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
            assert address is not None
            wait_for(lambda: answers(address.group()), "the start of the server")
            browser.open(f"{address.group()}/#/experiments/{experiment}/runs/{run_id}/model-metrics", 1280)
            for name in ("reward/format", "tool/call_rate"):
                browser.wait(f"document.body.innerText.includes('{name}')")
            browser.wait("document.querySelectorAll('.js-plotly-plot .scatterlayer path.js-line').length >= 2")
            browser.picture(tmp_path / "mlflow.png")
        finally:
            os.killpg(server.pid, signal.SIGTERM)
    assert (tmp_path / "mlflow.png").stat().st_size > 10_000
