"""The `paravt` command: parse the arguments, load the configuration, call one function.

Exit codes: 0 done, 1 it failed, 2 the input cannot be used, 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paravt_ray.errors import InputError, UserError

if TYPE_CHECKING:
    from paravt_ray.config import Config

CONFIG_SUFFIXES = (".yaml", ".yml")
ASK_CONFIG = "configs/debug.yaml"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except UserError as error:
        # Raised inside an actor it arrives with the actor's traceback as its text, and the original as its cause.
        cause = getattr(error, "cause", error)
        print(f"paravt: {cause}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"paravt: The disk is full, writing {error.filename or 'a file'}. Make room and go on.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nparavt: Stopped. {_what_is_kept(args)}", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="paravt",
        description="Reinforcement learning of vision-language models that crop long videos in parallel, on Ray.",
        epilog="First steps: `make debug` trains a tiny model on this machine; `paravt doctor CONFIG.yaml` says "
        "whether a run will fit; `paravt COMMAND --help` says more.",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, text: str, run: object, config: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text, epilog=_KEYS if config else None)
        sub.set_defaults(run=run)
        if config:
            sub.add_argument("config", metavar="CONFIG.yaml", help="configuration file, such as configs/debug.yaml")
            _add_overrides(sub)
        return sub

    command("train", "Train with reinforcement learning (PARA-GRPO, GRPO).", _train)
    command("sft", "Supervised cold start on recorded conversations.", _sft)
    command("eval", "Evaluate a checkpoint on benchmark splits.", _eval)
    ask = command("ask", "Ask one question about one video and see every turn.", _ask, config=False)
    ask.usage = 'paravt ask [-h] [--save FILE.html] [CONFIG.yaml] VIDEO "QUESTION" [key=value ...]'
    ask.add_argument("--save", metavar="FILE.html", help="also write a page with the frames that were seen")
    ask.add_argument(
        "words",
        nargs="+",
        metavar="[CONFIG.yaml] VIDEO QUESTION [key=value ...]",
        help=f"film.mp4 'What colour is the car?' rollout.overview_frames=16; {ASK_CONFIG} if left out",
    )
    _add_data_commands(commands)
    report = command("report", "Write one HTML page about a run, or about two side by side.", _report, config=False)
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    report.add_argument(
        "--out",
        type=Path,
        metavar="FILE.html",
        help="where to (default: into the first run directory); FILE.svg: only the curves, those of runs in one folder "
        "as seeds of one curve",
    )
    command("doctor", "Check versions, hardware, cluster, decoding and tokens before a run.", _doctor)
    text = "Run the paper's arms on the synthetic task, and draw what came of its claims."
    paradox = command("paradox", text, _paradox, config=False)
    paradox.epilog = "`steps=4 seeds=1` is a quick look, in a folder of its own. The same command goes on where it was."
    paradox.add_argument("--draw", type=Path, metavar="FOLDER", help="only draw again, from the records in FOLDER")
    paradox.add_argument("config", nargs="?", default="", metavar="CONFIG.yaml", help="such as configs/paradox.yaml")
    _add_overrides(paradox)
    bench = command("bench", "Measure one part against its peer or limit.", _bench, config=False)
    bench.add_argument("name", nargs="?", default="", help="what to measure; left out: list the names")
    return parser


def _add_data_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "Make the synthetic task, check videos, point data sets to local files."
    data = commands.add_parser("data", help=text, description=text)
    verbs = data.add_subparsers(title="commands", metavar="COMMAND", required=True)
    synth = verbs.add_parser("synth", help="make the synthetic long-video task (videos, questions, conversations)")
    synth.add_argument("folder", nargs="?", default="outputs/synth", help="where to write (default: %(default)s)")
    synth.add_argument("--seed", type=int, default=0, help="another seed makes other clips and questions")
    synth.set_defaults(run=_data_synth)
    check = verbs.add_parser("check", help="open every video of a data set and list those that cannot be used")
    check.add_argument("parquet", metavar="PARQUET", help="a data set with questions or conversations")
    check.add_argument("--video-root", default="", help="where relative paths start (default: the file's folder)")
    check.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    check.set_defaults(run=_data_check)
    text = "rewrite virtual video paths (museg/charades/x.mp4) to files on this machine, and list what is missing"
    materialize = verbs.add_parser("materialize", help=text, description=text)
    materialize.add_argument("parquet", metavar="IN.parquet")
    materialize.add_argument("output", metavar="OUT.parquet")
    materialize.add_argument("roots", nargs="+", metavar="ROOT=FOLDER", help="such as museg/charades=/data/charades")
    materialize.set_defaults(run=_data_materialize)
    text = "merge sequential tool traces (conversations) into parallel single-turn ones for the cold start"
    traces = verbs.add_parser("traces", help=text, description=text)
    traces.add_argument("parquet", metavar="IN.parquet")
    traces.add_argument("output", metavar="OUT.parquet")
    traces.set_defaults(run=_data_traces)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as trainer.steps=20")


_KEYS = f"All keys, their meaning and their defaults stand in {Path(__file__).parent / 'config' / 'schema.py'}."


def _load(args: argparse.Namespace) -> Config:
    """The command's configuration; a wrong one is refused before anything heavy is imported."""
    from paravt_ray.config import load_config

    return load_config(args.config, args.overrides)


def _train(args: argparse.Namespace) -> int:
    config = _load(args)
    args.keeps = config.trainer.run_dir
    from paravt_ray import trainer

    return trainer.train(config)


def _sft(args: argparse.Namespace) -> int:
    config = _load(args)
    args.keeps = config.sft.output
    from paravt_ray import sft

    return sft.run(config)


def _eval(args: argparse.Namespace) -> int:
    config = _load(args)
    args.goes_on = config.eval.results
    from paravt_ray import evaluation

    return evaluation.run(config)


def _ask(args: argparse.Namespace) -> int:
    words = list(args.words)
    named = Path(words[0]).suffix in CONFIG_SUFFIXES
    args.config = words.pop(0) if named else ASK_CONFIG
    if len(words) < 2:
        raise InputError('Write it as: paravt ask VIDEO "QUESTION". A configuration may stand before the video.')
    if not named and not Path(ASK_CONFIG).is_file():
        raise InputError(f'There is no {ASK_CONFIG} here. Name another: paravt ask CONFIG.yaml VIDEO "QUESTION".')
    args.overrides = words[2:]
    config = _load(args)
    from paravt_ray.evaluation import ask

    return ask.run(config, words[0], words[1], args.save)


def _data_synth(args: argparse.Namespace) -> int:
    from paravt_ray.data import synth

    return synth.run(args.folder, args.seed)


def _data_check(args: argparse.Namespace) -> int:
    from paravt_ray.data import check

    return check.run(args.parquet, args.video_root, args.json)


def _data_materialize(args: argparse.Namespace) -> int:
    from paravt_ray.data import materialize

    return materialize.run(args.parquet, args.output, args.roots)


def _report(args: argparse.Namespace) -> int:
    from paravt_ray import report

    return report.run(args.runs, args.out or report.default_output(args.runs))


def _data_traces(args: argparse.Namespace) -> int:
    from paravt_ray.data import traces

    return traces.run(args.parquet, args.output)


def _doctor(args: argparse.Namespace) -> int:
    config = _load(args)
    from paravt_ray import doctor

    return doctor.run(config)


def _paradox(args: argparse.Namespace) -> int:
    if args.draw is not None:
        from paravt_ray.paradox.draw import draw

        print("\n".join(map(str, draw(args.draw))))
        return 0
    if not args.config:
        raise InputError("Name a configuration (paravt paradox configs/paradox.yaml), or a folder with --draw.")
    from paravt_ray.paradox.plan import Plan

    plan = Plan.load(args.config, args.overrides)
    args.goes_on = plan.folder
    from paravt_ray.paradox import schedule

    return schedule.run(plan)


def _bench(args: argparse.Namespace) -> int:
    import importlib
    import pkgutil

    from paravt_ray import bench

    names = [module.name for module in pkgutil.iter_modules(bench.__path__) if not module.name.startswith("_")]
    if not args.name:
        print("\n".join(names))
        return 0
    if args.name not in names:
        raise InputError(f"Name one of: {', '.join(names)} (paravt bench NAME).")
    return int(importlib.import_module(f"paravt_ray.bench.{args.name}").main())


def _what_is_kept(args: argparse.Namespace) -> str:
    """One sentence on what an interrupted command leaves behind."""
    if "goes_on" in args:
        return f"What is done is kept in {args.goes_on}: the same command goes on from there."
    if "keeps" not in args:
        return "Nothing half-written is kept as finished."
    from paravt_ray.learner.checkpoint import latest_complete

    checkpoint = latest_complete(Path(args.keeps) / "checkpoints")
    if checkpoint is None:
        return f"No checkpoint was written yet; what was logged is in {args.keeps}."
    return f"{checkpoint} is kept: the same command with trainer.resume=auto goes on from there."


if __name__ == "__main__":
    sys.exit(main())
