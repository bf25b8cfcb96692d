"""`paravt report`: one self-contained HTML page about one run or two side by side, or the curves of many as SVG."""

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

    Where `out` ends with `.svg`, only the curves: of any number of runs, a curve a folder, whose runs are its seeds.

    Raises:
        InputError: there are too many directories or folders, one of them holds no run, or a curve cannot be drawn:
            runs of one folder differ in more than the seed, or one is damaged or has no finished step.
        ReportError: the page cannot be written.
    """
    from paravt_ray.tracking.run_dir import replace_file

    text = _curves(run_dirs) if out.suffix == ".svg" else _page(run_dirs)
    try:
        replace_file(out, text)
    except OSError as error:
        raise ReportError(f"{out} cannot be written: {error.strerror}. Name another file with --out.") from error
    print(f"{out.absolute()} ({len(text.encode()) / 2**20:.1f} MB): open it in a browser.")
    return 0


def _page(run_dirs: list[Path]) -> str:
    from paravt_ray.report.page import render
    from paravt_ray.report.source import read_run

    if not 1 <= len(run_dirs) <= 2:
        raise InputError(
            "Name one run directory, or two to compare: paravt report RUN [OTHER_RUN]. The curves of more of them go "
            "into a picture: --out FILE.svg."
        )
    return render([read_run(directory) for directory in run_dirs])


def _curves(run_dirs: list[Path]) -> str:
    from paravt_ray.report.figure import COLOURS, figure
    from paravt_ray.report.seeds import check_seeds, check_whole
    from paravt_ray.report.source import RunData, read_run

    curves: dict[Path, list[RunData]] = {}
    for run in map(read_run, run_dirs):
        check_whole(run)
        curves.setdefault(run.path.parent, []).append(run)
    if len(curves) > len(COLOURS):
        raise InputError(f"The runs lie in {len(curves)} folders: at most {len(COLOURS)} curves go into one picture.")
    for runs in curves.values():
        check_seeds(runs)
    named = [(folder.name.replace("_", " "), runs) for folder, runs in curves.items()]
    return figure(named, " and ".join(label for label, _ in named))
