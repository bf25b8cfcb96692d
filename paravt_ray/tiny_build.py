"""`make tiny-model`, `make tiny-priors`: everything from a seed to the tiny models that ship with the package.

Synthetic data, an untrained checkpoint, four stages of supervised training, a measurement. About half an hour on two
cores; a stage that was finished before is not run again.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paravt_ray.config import Config, load_config
from paravt_ray.data.synth import SynthSizes, held_out_questions, synthesize
from paravt_ray.errors import InputError
from paravt_ray.sft.train import train
from paravt_ray.tiny_measure import measure
from paravt_ray.tiny_model import write_blank_model

SIZES = SynthSizes(
    train_clips=300,
    reading_conversations=17600,
    looking_conversations=14400,
    overview_conversations=4800,
    prior_conversations=7800,
    sft_conversations=2000,
    calling_conversations=2600,
)
Stages = dict[str, tuple[str, ...]]
"""What is trained, one after the other: `configs/tiny_STAGE.yaml` and what differs from it."""
_BEGINNING: Stages = {"reading": (), "looking": ()}
MODELS: dict[str, Stages] = {
    "tiny": {**_BEGINNING, "prior": (), "sft": ()},
    "tiny_strong": {
        **_BEGINNING,
        "overviews": (),
        "prior": ("model.path=outputs/tiny/overviews", "sft.output=outputs/tiny/strong_prior"),
        "cold_start": (),
    },
    "tiny_weak": {
        **_BEGINNING,
        "overviews": (),
        "prior": (
            "model.path=outputs/tiny/overviews",
            "data.train=outputs/tiny/data/sft_weak_prior.parquet",
            "sft.output=outputs/tiny/weak_prior",
        ),
        "cold_start": ("model.path=outputs/tiny/weak_prior", "sft.output=outputs/tiny/weak"),
    },
}
"""`tiny_weak` sees hardly a call before the project's own format; else it is made as `tiny_strong` is."""
CONFIGS = Path("configs")
WORK = Path("outputs/tiny")
"""Where the stages' configurations look for what the stage before left."""
TOKENIZER_CONVERSATIONS = 4000
ROLES = "system\nuser\nassistant\n"
LARGEST_BYTES = 8 << 20


def build_tiny_model(out: Path, seed: int, overrides: Stages) -> Path:
    """Build and train a tiny model, and put it into `out` with a `manifest.json`.

    Run it from the repository's root.

    Args:
        out: folder of the result.
        seed: of the data, the first weights and the order of training.
        overrides: by stage, what differs from its configuration.

    Raises:
        UserError: a stage cannot run, or what an earlier build left was made otherwise; what is wrong, the way out.
        ValueError: the model is larger than may be shipped, or could not be measured.
    """
    data, blank = WORK / "data", WORK / "blank"
    made, wanted = data / "made.json", {"seed": seed, **asdict(SIZES)}
    if not made.is_file():
        print("\n".join(synthesize(data, seed, SIZES).lines()))
        made.write_text(json.dumps(wanted), encoding="utf-8")  # last: all of it is there
    elif json.loads(made.read_text(encoding="utf-8")) != wanted:
        raise InputError(f"{data} was made with another seed or other sizes. Remove {WORK}, and all is made anew.")
    if not (blank / "config.json").is_file():
        write_blank_model(blank, tokenizer_texts(data), seed)
    stages: dict[str, Any] = {}
    for stage, changes in overrides.items():
        config = load_config(CONFIGS / f"tiny_{stage}.yaml", [f"trainer.seed={seed}", *changes])
        stages[stage] = _settings(config)
        output = Path(config.sft.output)
        if not (output / "config.json").is_file():
            print(f"Stage {stage}:")
            train(config)
        elif _settings(load_config(output / "config.yaml")) != stages[stage]:
            raise InputError(f"{output} was trained with other settings. Remove it and what was made after it.")
    trained = Path(config.sft.output)
    manifest = {"seed": seed, "data": asdict(SIZES), "stages": stages}
    if "sft" in overrides:  # the others are measured by `paravt paradox`
        manifest["measured"] = measure(_agent_config(trained, data), held_out_questions(seed, SIZES), WORK / "logs")
    return _ship(trained, out, manifest)


def tokenizer_texts(data: Path) -> list[str]:
    """The texts that the tokenizer is trained on: messages of all kinds, and the roles' names."""
    from paravt_ray.data.reader import read_rows

    texts = [ROLES] * TOKENIZER_CONVERSATIONS
    for name in ("sft_reading", "sft_looking", "sft_prior", "sft_train"):
        for row in read_rows(data / f"{name}.parquet", ["messages"])[:TOKENIZER_CONVERSATIONS]:
            parts = [part for message in json.loads(row["messages"]) for part in message["content"]]
            texts += [part["text"] for part in parts if part["type"] == "text"]
    # The renderer writes the times of frames; no message holds them.
    return texts + [f"<{second}.{tenth} seconds>" for second in range(600) for tenth in (0, 2, 5, 8)]


def _settings(config: Config) -> dict[str, Any]:
    learner = config.learner
    return {
        "model": config.model.path,
        "conversations": config.data.train,
        "batch_size": config.sft.batch_size,
        "steps": config.sft.steps,
        "lr": learner.lr,
        "schedule": learner.schedule,
    }


def _agent_config(model: Path, data: Path) -> Config:
    overrides = [f"model.path={model}", f"data.train={data}/train.parquet", f"data.valid={data}/valid.parquet"]
    return load_config(CONFIGS / "debug.yaml", overrides)


def _ship(trained: Path, out: Path, manifest: dict[str, Any]) -> Path:
    files = [file for file in trained.iterdir() if file.suffix in (".json", ".jinja", ".safetensors")]
    size = sum(file.stat().st_size for file in files)
    if size > LARGEST_BYTES:
        raise ValueError(f"The model takes {size / 2**20:.1f} MiB; at most {LARGEST_BYTES >> 20} are shipped.")
    out.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, out / file.name)
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make tiny models from a seed, and put them into the package.")
    parser.add_argument("models", nargs="+", choices=MODELS)
    for name in parser.parse_args().models:
        print(f"Wrote {build_tiny_model(Path(__file__).with_name('assets') / name, seed=0, overrides=MODELS[name])}.")
