"""`paravt eval`: a split's questions asked through the agent loop of training, at temperature 0, sample by sample.

Every scored sample is on the disk as soon as it is there, and what is there already is not asked again. What failed (an
engine's error, a deadline, a missing video) is counted, never scored, and asked again next time.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.progress import track

from paravt_ray.chat import Chat
from paravt_ray.cluster import connected
from paravt_ray.config import Config, model_directory
from paravt_ray.evaluation.export import write_samples
from paravt_ray.evaluation.results import Owner, ResultFile, owner_of, question_key, read_results
from paravt_ray.evaluation.splits import SCHEMAS, Question, read_split
from paravt_ray.evaluation.tables import Score, beside_paper, report, scores
from paravt_ray.rewards.judge import Judge
from paravt_ray.rewards.outcomes import ScoringFailure, score_all
from paravt_ray.rollout.fleet import GeneratorFleet
from paravt_ray.rollout.frames import crop_pool
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.tracking.logs import log_to_file
from paravt_ray.tracking.run_dir import replace_file

logger = logging.getLogger(__name__)


def run(config: Config) -> int:
    """Ask what is not answered yet, write tables and samples to `eval.results`, print the tables.

    Returns:
        0 if every question has its result, 1 if some could not be scored.

    Raises:
        UserError: the split or the model cannot be read, the results are in use, or the generators do not start.
    """
    label = _label(config)
    config = as_evaluated(config)
    chat = Chat.from_pretrained(config.model.path, config.model.frames_as)
    read = read_split(config, lambda text: len(chat.encode_text(text)))
    questions = {question_key(question): question for question in read}
    print(f"Reading the files of {config.model.path}: results are kept by their digest (a minute for a large model).")
    folder, owner = Path(config.eval.results).absolute(), owner_of(config)
    with ResultFile(folder / f"{config.eval.split}.jsonl") as file:
        known = read_results(file.path, owner, config.reward.open_ended)
        left = [question for key, question in questions.items() if key not in known]
        print(f"{config.eval.split}: {len(questions)} questions, {len(questions) - len(left)} of them answered before.")
        failures: Counter[str] = Counter()
        if left:
            with started_fleet(config, chat, folder / "logs") as fleet:
                failures = ask(left, config, fleet, file, owner)
        results = read_results(file.path, owner, config.reward.open_ended)
    found = {key: results[key] for key in questions if key in results}
    text = report(config.eval.split, list(found.values()), len(questions), failures)
    if config.eval.split in SCHEMAS:
        text += f"\n\nBeside the paper's 8B models, in %:\n\n{beside_paper(label, _headlines(folder, owner, config))}"
        write_samples(folder / f"samples_{SCHEMAS[config.eval.split].lmms_task}.jsonl", questions, found)
    replace_file(folder / f"{config.eval.split}.md", f"# {label}\n\n{text}\n")
    print(f"\n{text}\n\nResults, table, logs and samples for lmms-eval are in {folder}.")
    if failures:
        print("The same command asks again what was not scored.")
    return 1 if failures else 0


def as_evaluated(config: Config) -> Config:
    """A copy in which `model.path` is a directory and `eval.tools` has taken effect on the agent loop."""
    config = copy.deepcopy(config)
    config.model.path = str(model_directory(config))
    if not config.eval.tools:
        config.rollout.max_tool_turns = 0
    return config


@contextmanager
def started_fleet(config: Config, chat: Chat, logs: Path) -> Iterator[GeneratorFleet]:
    """The cluster, the crop service and the generators, for the length of the block."""
    logs.mkdir(parents=True, exist_ok=True)
    log_to_file(logs)
    with ExitStack() as stack:
        stack.enter_context(connected(config, logs))
        pool = crop_pool(config, chat.patch_factor)
        stack.callback(pool.close)
        print(f"Starting {config.rollout.generators} engines (under a minute for a small model, minutes for a large).")
        fleet = stack.enter_context(GeneratorFleet(config, pool, logs))
        fleet.wait_started()
        yield fleet


def ask(
    questions: Sequence[Question], config: Config, fleet: GeneratorFleet, file: ResultFile, owner: Owner
) -> Counter[str]:
    """Ask questions, write each result as it comes, and return what failed, by kind."""
    failures: Counter[str] = Counter()
    judge = Judge.of(config)
    asked: dict[str, Question] = {}
    for question in questions:
        if all(Path(video).is_file() for video in question.sample.videos):
            asked[f"eval/{len(asked)}"] = question
        else:
            failures["video missing"] += 1
    batch = fleet.submit([_spec(group_id, question, config) for group_id, question in asked.items()])
    for _ in track(asked, description=config.eval.split):
        (group,) = batch.collect(1)
        question = asked[group.group_id]
        for reason in group.failures:
            logger.warning("Sample %s failed: %s", question.sample.sample_id, reason)
            failures[reason.split(":", 1)[0]] += 1
        # In this process: a pool of reward actors would cost processes and a start on every command, to guard against a
        # scorer that hangs on one answer. Here that costs no more than the command, which goes on from what it has.
        outcomes = score_all(group.episodes, config, judge).outcomes
        for episode, outcome in zip(group.episodes, outcomes, strict=True):
            if isinstance(outcome, ScoringFailure):
                logger.warning("Sample %s cannot be scored: %s", question.sample.sample_id, outcome.reason)
                failures["reward"] += 1
            else:
                episode.rewards = outcome
                file.add(owner, question, episode)
    return failures


def _spec(group_id: str, question: Question, config: Config) -> GroupSpec:
    settings = config.eval
    return GroupSpec(
        group_id,
        question.sample,
        config.rollout.overview_frames,
        group_size=1,
        temperature=0.0,
        seed=config.trainer.seed,
        answer_tokens=(
            settings.mcq_answer_tokens if question.sample.question_type == "mcq" else settings.other_answer_tokens
        ),
    )


def _headlines(folder: Path, owner: Owner, config: Config) -> dict[str, Score]:
    """The first score of every split that has results of this owner."""
    read = {split: read_results(folder / f"{split}.jsonl", owner, config.reward.open_ended) for split in SCHEMAS}
    return {split: scores(split, list(found.values()))[0] for split, found in read.items() if found}


def _label(config: Config) -> str:
    """A run's name in tables."""
    return f"{config.model.path}, {f'{config.rollout.dispatch} calls' if config.eval.tools else 'without tools'}"
