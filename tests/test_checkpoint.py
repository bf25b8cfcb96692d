"""Checkpoints: whole or not at all, gone on from to the last bit, on any number of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from learning import largest_difference, make_config, make_learner, weights

from paravt_ray.chat import Chat
from paravt_ray.episode import TrainRow
from paravt_ray.learner import checkpoint
from paravt_ray.learner.checkpoint import (
    COMPLETE,
    CheckpointError,
    CheckpointWriteError,
    atomic_directory,
    latest_complete,
    prune,
    read_state,
    read_tensors,
    replace_model,
    write_tensors,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def make_complete(directory: Path, step: int) -> Path:
    path = directory / f"step_{step:06d}"
    with atomic_directory(path) as building:
        (building / "state.json").write_text(json.dumps({"step": step}))
    return path


# ---- going on ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (2, "float32"), (3, "float32"), (2, "bfloat16")])
def test_a_resumed_run_equals_the_unbroken_one_to_the_last_bit(
    tiny_path: Path, tiny_rows: list[TrainRow], tmp_path: Path, stage: int, dtype: str
) -> None:
    config = make_config(zero_stage=stage, schedule="cosine", warmup_steps=2)
    config.model.dtype = dtype
    unbroken = make_learner(tiny_path, config)
    for step in range(4):
        metrics = unbroken.update(tiny_rows)
        if step == 1:
            unbroken.save(tmp_path / "step_000002", {"position": 7}, keep=2)
    expected = weights(unbroken)
    unbroken.close()

    resumed = make_learner(tiny_path, config, resume=tmp_path / "step_000002")
    assert resumed.steps_done == 2 and read_state(tmp_path / "step_000002") == {"position": 7}
    for _ in range(2):
        again = resumed.update(tiny_rows)
    found = weights(resumed)
    resumed.close()
    assert again["train/lr"] == metrics["train/lr"] and again["train/loss"] == metrics["train/loss"]
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_a_checkpoint_of_one_zero_stage_is_gone_on_from_in_another(
    tiny_path: Path, tiny_rows: list[TrainRow], tmp_path: Path
) -> None:
    learner = make_learner(tiny_path, make_config(zero_stage=3))
    learner.update(tiny_rows)
    learner.save(tmp_path / "step_000001", {}, keep=1)
    learner.update(tiny_rows)
    expected = weights(learner)
    learner.close()
    other = make_learner(tiny_path, make_config(zero_stage=0), resume=tmp_path / "step_000001")
    other.update(tiny_rows)
    assert largest_difference(weights(other), expected) < 1e-4
    other.close()


def test_a_checkpoint_before_the_first_step_can_be_gone_on_from(
    tiny_path: Path, tiny_rows: list[TrainRow], tmp_path: Path
) -> None:
    learner = make_learner(tiny_path, make_config())
    learner.save(tmp_path / "step_000000", {}, keep=1)
    learner.update(tiny_rows)
    expected = weights(learner)
    learner.close()
    resumed = make_learner(tiny_path, make_config(), resume=tmp_path / "step_000000")
    resumed.update(tiny_rows)
    assert largest_difference(weights(resumed), expected) == 0
    resumed.close()


RESUMED = """\
import sys
from pathlib import Path
import numpy as np
import torch
from learning import make_config
from paravt_ray.learner.actor import LearnerActor, free_port
from paravt_ray.learner.engine import denormals_flushed
from paravt_ray.learner.schedule import LrSchedule

model, checkpoint = map(Path, sys.argv[1:])
torch.set_num_threads(4)
config, actor = make_config(), LearnerActor(0)
schedule, rendezvous = LrSchedule.from_config(config.learner, 10), f"tcp://127.0.0.1:{free_port()}"
actor.start(config, model, schedule, ranks=1, rendezvous=rendezvous, resume=checkpoint)
small = torch.from_numpy(np.full(1 << 20, 1e-39, np.float32))
with denormals_flushed():
    inside = small * 1e10
outside = small[:8] * 1e10  # too few for more threads than this one
print(int(inside.count_nonzero()), int(outside.count_nonzero()))
"""


def test_denormals_are_flushed_by_all_threads_of_a_learner_that_goes_on(
    tiny_path: Path, tiny_rows: list[TrainRow], tmp_path: Path
) -> None:
    """Going on computes, which starts OpenMP's threads. In a process of its own, where nothing has started them."""
    learner = make_learner(tiny_path, make_config())
    learner.update(tiny_rows)
    learner.save(tmp_path / "step_000001", {}, keep=1)
    learner.close()
    command = [sys.executable, "-c", RESUMED, str(tiny_path), str(tmp_path / "step_000001")]
    found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "0 8"


def test_another_learning_rate_schedule_is_refused(tiny_path: Path, tiny_rows: list[TrainRow], tmp_path: Path) -> None:
    learner = make_learner(tiny_path, make_config(schedule="cosine"), steps=10)
    learner.update(tiny_rows)
    learner.update(tiny_rows)
    learner.save(tmp_path / "step_000002", {}, keep=1)
    learner.close()
    with pytest.raises(CheckpointError, match="another learning rate"):
        make_learner(tiny_path, make_config(schedule="cosine"), steps=20, resume=tmp_path / "step_000002")


def test_the_model_loads_in_transformers_as_it_is(tiny_path: Path, tiny_rows: list[TrainRow], tmp_path: Path) -> None:
    from transformers import AutoProcessor, Qwen3VLForConditionalGeneration

    learner = make_learner(tiny_path, make_config())
    learner.update(tiny_rows)
    learner.save(tmp_path / "step_000001", {}, keep=1)
    expected = weights(learner)
    learner.close()
    model, report = Qwen3VLForConditionalGeneration.from_pretrained(
        tmp_path / "step_000001" / "model", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert all(np.array_equal(tensor.numpy(), expected[name]) for name, tensor in model.state_dict().items())
    assert model.dtype == torch.float32
    processor = AutoProcessor.from_pretrained(tmp_path / "step_000001" / "model")
    assert processor.tokenizer.get_vocab() == Chat.from_pretrained(tiny_path).tokenizer.get_vocab()


# ---- on the disk ---------------------------------------------------------------------------------------------------


def test_large_checkpoints_are_cut_into_files_with_an_index(
    monkeypatch: pytest.MonkeyPatch, tiny_path: Path, tmp_path: Path
) -> None:
    from transformers import Qwen3VLForConditionalGeneration

    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 50_000)
    original = dict(read_tensors(tiny_path))
    checkpoint.write_model(original.items(), tiny_path, tmp_path / "model")
    files = sorted((tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2
    assert all(f.name.endswith(f"of-{len(files):05d}.safetensors") for f in files)
    again = dict(read_tensors(tmp_path / "model"))
    assert again.keys() == original.keys() and all(torch.equal(again[name], original[name]) for name in original)
    loaded = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(loaded[name], original[name]) for name in original)


_SAVER = """
import sys, torch
from pathlib import Path
from paravt_ray.learner.checkpoint import atomic_directory, prune, write_json, write_tensors
directory, step = Path(sys.argv[1]), int(sys.argv[2])
tensors = {str(i): torch.full((1000,), float(step)) for i in range(50)}
print("ready", flush=True)
while True:
    step += 1
    with atomic_directory(directory / f"step_{step:06d}") as building:
        write_tensors(tensors.items(), building / "model", "model")
        write_json(building / "state.json", {"step": step})
    prune(directory, keep=2)
"""


def test_a_save_killed_at_any_moment_leaves_a_usable_checkpoint(tmp_path: Path) -> None:
    make_complete(tmp_path, 1)
    newest = 1
    for delay in np.linspace(0.001, 0.05, 8):
        saver = subprocess.Popen(
            [sys.executable, "-c", _SAVER, str(tmp_path), str(newest)], stdout=subprocess.PIPE, text=True
        )
        assert saver.stdout is not None and saver.stdout.readline() == "ready\n"
        time.sleep(delay)
        os.kill(saver.pid, signal.SIGKILL)
        saver.wait(10)
        found = latest_complete(tmp_path)
        assert found is not None
        step = read_state(found)["step"]
        assert step >= newest and found.name == f"step_{step:06d}"
        if step > 1:
            assert len(dict(read_tensors(found / "model"))) == 50
        newest = step
    assert newest > 1, "nothing was ever saved, so nothing was tested"


def test_only_marked_checkpoints_count_and_the_newest_is_chosen_by_number(tmp_path: Path) -> None:
    assert latest_complete(tmp_path) is None
    for step in (999_999, 1_000_000, 5):
        make_complete(tmp_path, step)
    (tmp_path / "step_2000000").mkdir()
    found = latest_complete(tmp_path)
    assert found is not None and found.name == "step_1000000"
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        read_state(tmp_path / "step_2000000")


def test_pruning_keeps_the_newest_and_clears_what_interrupted_saves_left(tmp_path: Path) -> None:
    for step in (999_998, 999_999, 1_000_000):
        make_complete(tmp_path, step)
    (tmp_path / "step_000007").mkdir()
    (tmp_path / ".step_000008.building").mkdir()
    (tmp_path / "notes").mkdir()
    prune(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step_1000000", "step_999999"]


def test_a_failed_save_says_so_and_touches_nothing(tmp_path: Path) -> None:
    kept = make_complete(tmp_path, 1)
    with pytest.raises(CheckpointWriteError, match="No space left"), atomic_directory(tmp_path / "step_000002"):
        raise OSError(28, "No space left on device")
    assert latest_complete(tmp_path) == kept


_SAVER_ON_A_FULL_DISK = """
import resource, sys, torch
from pathlib import Path
from paravt_ray.learner.checkpoint import CheckpointWriteError, atomic_directory, write_tensors
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
try:
    with atomic_directory(Path(sys.argv[1])) as building:
        write_tensors([("a", torch.zeros(1 << 20))], building / "model", "model")
except CheckpointWriteError as error:
    print(error)
"""


def test_weights_that_find_no_room_are_one_sentence(tmp_path: Path) -> None:
    """The library that writes tensors does not raise an OSError, as all else does."""
    kept = make_complete(tmp_path, 1)
    command = [sys.executable, "-c", _SAVER_ON_A_FULL_DISK, str(tmp_path / "step_000002")]
    saver = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert saver.returncode == 0, saver.stderr
    assert "step_000002 could not be written (" in saver.stdout and "File too large" in saver.stdout
    assert latest_complete(tmp_path) == kept


def test_a_step_that_is_saved_again_replaces_the_old_one(tmp_path: Path) -> None:
    make_complete(tmp_path, 3)
    with atomic_directory(tmp_path / "step_000003") as building:
        (building / "state.json").write_text('{"step": 33}')
    assert read_state(tmp_path / "step_000003") == {"step": 33}
    assert [p.name for p in tmp_path.iterdir()] == ["step_000003"]


def test_a_model_is_replaced_in_place_beside_other_files(tiny_path: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}")
    (tmp_path / "model-00001-of-00002.safetensors").write_text("old")

    def write(out: Path) -> None:
        checkpoint.write_model(read_tensors(tiny_path), tiny_path, out)

    replace_model(tmp_path, write)
    assert not (tmp_path / "model-00001-of-00002.safetensors").exists()
    assert len(dict(read_tensors(tmp_path))) == len(dict(read_tensors(tiny_path)))
    assert (tmp_path / "tokenizer.json").is_file() and (tmp_path / "metrics.jsonl").is_file()
    assert not (tmp_path / COMPLETE).exists()


def test_ranks_that_do_not_write_still_walk_through_all_tensors(tmp_path: Path) -> None:
    walked = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abc":
            walked.append(name)
            yield name, torch.zeros(1)

    write_tensors(tensors(), tmp_path / "out", "model", write=False)
    assert walked == ["a", "b", "c"] and not (tmp_path / "out").exists()
