"""`paravt report`: one self-contained HTML file about one run, or about two side by side."""

from __future__ import annotations

from pathlib import Path

from paravt_ray.errors import InputError, UserError


class ReportError(UserError):
    """The page cannot be written."""


def default_output(run_dirs: list[Path]) -> Path:
    """Where the page goes unless told otherwise: into the first run directory."""
    name = "report.html" if len(run_dirs) == 1 else f"report_vs_{run_dirs[1].absolute().name}.html"
    return run_dirs[0] / name


def run(run_dirs: list[Path], out: Path) -> int:
    """Write the page about one or two run directories to `out`, whole or not at all, and say where it is.

    Raises:
        InputError: there are not one or two directories, or one of them holds no run.
        ReportError: the page cannot be written.
    """
    from paravt_ray.report.page import render
    from paravt_ray.report.source import read_run
    from paravt_ray.tracking.run_dir import replace_file

    if not 1 <= len(run_dirs) <= 2:
        raise InputError("Name one run directory, or two to compare: paravt report RUN [OTHER_RUN].")
    page = render([read_run(directory) for directory in run_dirs])
    try:
        replace_file(out, page)
    except OSError as error:
        raise ReportError(f"{out} cannot be written: {error.strerror}. Name another file with --out.") from error
    print(f"{out.absolute()} ({len(page.encode()) / 2**20:.1f} MB): open it in a browser.")
    return 0
