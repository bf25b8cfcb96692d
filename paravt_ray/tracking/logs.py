"""What libraries have to say goes to files, so that the screen belongs to the run."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

NOISY = ("ray", "vllm", "DeepSpeed", "transformers", "mlflow", "alembic", "torch", "asyncio", "urllib3")


def log_to_file(logs: Path) -> None:
    """Send this process's log records and warnings to `logs/driver.log` instead of the screen."""
    handler = logging.FileHandler(logs / "driver.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    for name in NOISY:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True
    warnings.simplefilter("default")
    logging.captureWarnings(True)


def link_ray_logs(logs: Path, session_dir: Path) -> None:
    """Make the logs of this machine's Ray processes and actors reachable as `logs/ray`.

    Args:
        logs: of the run directory.
        session_dir: Ray's, such as `/tmp/ray/session_latest`.
    """
    link = logs / "ray"
    link.unlink(missing_ok=True)
    link.symlink_to(session_dir / "logs")
