"""Preflight: what a run asks for against what there is, and checks that fail when they should."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
from tiny import make_tiny_checkpoint

from paravt_ray import doctor
from paravt_ray.cluster import connected
from paravt_ray.config import Config, ConfigError, load_config
from paravt_ray.doctor import Bundle, Node, ResourcesError, check_resources, demand, unplaced
from paravt_ray.errors import UserError
from paravt_ray.learner.sizing import learner_size
from paravt_ray.weights.manifest import checkpoint_shapes

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def config(**sections: dict[str, object]) -> Config:
    result = Config()
    for section, values in sections.items():
        for key, value in values.items():
            setattr(getattr(result, section), key, value)
    return result


def levels(lines: object) -> list[str]:
    return [line.level for line in lines]  # type: ignore[attr-defined]


# Resources


def test_a_generator_needs_its_gpus_on_one_machine() -> None:
    generator = Bundle("generator", 1, 4)
    assert unplaced([generator], [Node(8, 2), Node(8, 2)]) == [generator]
    assert unplaced([generator], [Node(8, 2), Node(8, 4)]) == []


def test_small_actors_do_not_take_the_room_of_large_ones() -> None:
    small, large = Bundle("learner rank", 1, 1), Bundle("generator", 1, 2)
    assert unplaced([small, small, large], [Node(8, 2), Node(8, 2)]) == []
    assert unplaced([small, small, small, large], [Node(8, 2), Node(8, 2)]) == [small]


def test_gpus_are_asked_for_only_where_there_are_some() -> None:
    settings = config(rollout={"generators": 2, "tensor_parallel": 4}, learner={"ranks": 3}, tools={"workers": 5})
    assert sum(bundle.gpus for bundle in demand(settings, on_gpus=True)) == 2 * 4 + 3
    assert sum(bundle.gpus for bundle in demand(settings, on_gpus=False)) == 0
    assert sum(bundle.cpus for bundle in demand(settings, on_gpus=False)) == 2 + 3 + 5 + 1


EIGHT, FOUR = Node(cpus=32, gpus=8), Node(cpus=32, gpus=4)


@pytest.mark.parametrize("path", [*CONFIGS.glob("ablations/*.yaml"), *CONFIGS.glob("*grpo_8b.yaml")], ids=str)
def test_the_8b_recipes_fill_eight_gpus_and_in_another_shape_four(path: Path) -> None:
    bundles = demand(load_config(path), on_gpus=True)
    assert (unplaced(bundles, [EIGHT]), sum(bundle.gpus for bundle in bundles)) == ([], 8)
    named = re.search(r"Four GPUs in all: (.+)", (CONFIGS / "paragrpo_8b.yaml").read_text())
    assert named is not None
    assert unplaced(demand(load_config(path, named[1].split()), on_gpus=True), [FOUR]) == []
    shared = re.search(r"Four GPUs shared by both.*: (.+)", (CONFIGS / "paragrpo_8b.yaml").read_text())
    assert shared is not None
    assert unplaced(demand(load_config(path, shared[1].split()), on_gpus=True), [FOUR]) == []


def test_the_8b_evaluation_fits_eight_gpus_and_its_prompt_fits_the_context(checkpoint: Path) -> None:
    settings = load_config(CONFIGS / "eval_8b.yaml")
    generators = [bundle for bundle in demand(settings, on_gpus=True) if bundle.actor == "generator"]
    assert (unplaced(generators, [EIGHT]), len(generators)) == ([], 8)
    settings.model.path = str(checkpoint)  # with the patch size of the 8B model, which is all that counts here
    assert levels(doctor.check_model(settings)) == ["ok", "ok", "ok", "ok"]


def test_a_cluster_that_is_too_small_is_refused_with_demand_and_supply() -> None:
    settings = config(tools={"workers": 6}, cluster={"cpus": 7})
    with pytest.raises(
        ResourcesError,
        match=r"asks for 9 logical CPUs .*6 x tool worker.* has 7 logical CPUs.* no machine has room for",
    ) as refused:
        check_resources(settings)
    assert "cluster.cpus" in str(refused.value)
    settings.cluster.cpus = 9
    told = check_resources(settings)
    assert "asks for 9 logical CPUs" in told and f"not cores, of which this machine has {os.cpu_count()}." in told
    settings.cluster.address = "auto"
    assert check_resources(settings).endswith("not cores."), "another machine's are not known"


def trains(path: Path) -> bool:
    """Whether a file is for `paravt train`, on a cluster that the run starts itself."""
    settings = load_config(path)
    return bool(settings.data.train) and settings.sft == Config().sft and not settings.cluster.address


@pytest.mark.parametrize("path", list(filter(trains, sorted(CONFIGS.glob("**/*.yaml")))), ids=lambda path: path.stem)
def test_every_recipe_fits_the_cluster_that_it_starts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_gpu_count", lambda: 8)
    check_resources(load_config(path))


def test_a_cluster_that_the_run_starts_has_what_its_actors_ask_for(tmp_path: Path) -> None:
    settings = config(tools={"workers": 30}, cluster={"object_store_gb": 0.1})
    with connected(settings, tmp_path):
        assert check_resources(settings).startswith("The run asks for 33 logical CPUs")


def test_a_running_cluster_is_asked_what_is_free() -> None:
    import ray

    settings = config(tools={"workers": 1})  # 4 logical CPUs in all
    ray.init(address="local", include_dashboard=False, num_cpus=4, log_to_driver=False, object_store_memory=80 << 20)
    try:
        check_resources(settings)

        @ray.remote(num_cpus=1)
        class Other:
            def ready(self) -> bool:
                return True

        other = Other.remote()
        ray.get(other.ready.remote(), timeout=60)
        with pytest.raises(ResourcesError, match="has 3 logical CPUs"):
            check_resources(settings)
        settings.tools.workers, settings.rollout.generators = 3, 4
        with pytest.raises(ResourcesError, match=r"no machine has room for 1 x generator, 3 x tool worker"):
            check_resources(settings)
    finally:
        ray.shutdown()


# The other checks


@pytest.mark.parametrize("frames_as", ["images", "video"])
def test_processor_and_renderer_agree(checkpoint: Path, frames_as: str) -> None:
    lines = list(doctor.check_model(config(model={"path": str(checkpoint), "frames_as": frames_as})))
    assert levels(lines) == ["ok", "ok", "ok", "ok"]
    assert "Token parity" in lines[1].text


@pytest.mark.parametrize("frames_as", ["images", "video"])
def test_a_processor_with_another_patch_size_is_found(checkpoint: Path, tmp_path: Path, frames_as: str) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (tmp_path / name).exists():
            text = (tmp_path / name).read_text()
            (tmp_path / name).write_text(text.replace('"patch_size": 16', '"patch_size": 8'))
    *_, last = doctor.check_model(config(model={"path": str(tmp_path), "frames_as": frames_as}))
    assert last.level == "failure"
    assert "another patch or merge size" in last.text


def test_overviews_that_cannot_fit_are_found(checkpoint: Path) -> None:
    settings = config(model={"path": str(checkpoint), "context_length": 5120})
    assert levels(doctor.check_model(settings)) == ["ok", "ok", "failure", "ok"]
    settings.model.frames_as = "video"
    assert levels(doctor.check_model(settings)) == ["ok", "ok", "ok", "ok"]


@pytest.mark.parametrize("content", [None, "{", '{"model_type": "llama"}'])
def test_no_checkpoint_of_ours_is_one_sentence(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"model\.path|no configuration"):
        list(doctor.check_model(config(model={"path": str(tmp_path)})))


def test_a_checkpoint_without_tokenizer_is_one_sentence(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    with pytest.raises(UserError, match="cannot be loaded"):
        list(doctor.check_model(config(model={"path": str(tmp_path)})))


def test_a_rank_holds_state_of_what_it_trains_and_no_more() -> None:
    """Hand-computed: a norm of 7, one adapted layer of [20, 10], a vision layer of [4, 4]."""
    layer = "model.language_model.layers.0.self_attn.q_proj.weight"
    shapes = {
        layer: (20, 10),
        "model.visual.blocks.0.attn.proj.weight": (4, 4),
        "model.language_model.norm.weight": (7,),
    }
    full = config(learner={"ranks": 2, "zero_stage": 2})
    size = learner_size(shapes, full)
    assert (size.parameters, size.trained) == (223, 223)
    assert (size.weights, size.gradients, size.optimizer, size.reference) == (446, 446, 223 * 12 // 2, 446)
    lora = config(model={"dtype": "float32"}, learner={"ranks": 2, "zero_stage": 3, "lora_rank": 3})
    size = learner_size(shapes, lora)
    assert (size.parameters, size.trained) == (223, 90)
    assert (size.weights, size.gradients, size.optimizer, size.reference) == (313 * 2, 180, 360, 0)


def test_a_learner_that_no_memory_can_hold_is_warned_of(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_memory", lambda: (1 << 20, 1 << 20))
    (line,) = [line for line in doctor.check_model(config(model={"path": str(checkpoint)})) if "Learner" in line.text]
    assert line.level == "warning" and "learner.lora_rank" in line.text


def test_what_waits_while_shared_gpus_change_hands_is_told(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(
        model={"path": str(checkpoint)},
        learner={"ranks": 2},
        rollout={"generators": 3},
        cluster={"colocate": True},
    )
    size = learner_size(checkpoint_shapes(checkpoint), settings)
    assert (size.checkpoint, size.pushed) == (2 * size.parameters, 2 * size.parameters)
    assert learner_size(checkpoint_shapes(checkpoint), config(learner={"lora_rank": 2})).pushed < size.pushed / 2
    held = 2 * size.total + 3 * size.checkpoint + size.pushed
    for memory, level in ((held, "ok"), (held - 1, "warning")):
        monkeypatch.setattr(doctor, "_memory", lambda memory=memory: (memory, memory))
        (line,) = [line for line in doctor.check_model(settings) if "Shared GPUs" in line.text]
        assert line.level == level


def test_decoding_is_checked_frame_by_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(doctor.check_decoding(Config())) == ["ok"]
    from tool_workers.records import Crop

    stuck = Crop(np.full((4, 32, 32, 3), 48, np.uint8), np.array([1.0, 1.5, 2.0, 2.5]))
    monkeypatch.setattr("tool_workers.crop", lambda *args, **options: stuck)
    (line,) = doctor.check_decoding(Config())
    assert line.level == "failure" and line.text.endswith("Reinstall av."), "the only reader"


def test_a_wrong_version_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.requires", lambda name: ["ray[default]==2.60.0", "numpy>=2", "av==1.2.3"])
    lines = {line.text.split()[0]: line.level for line in doctor.check_versions(Config())}
    assert lines["ray"] == "ok"
    assert lines["av"] == "failure"


def test_machine_checks_do_not_create_the_run_directory(tmp_path: Path) -> None:
    settings = config(trainer={"run_dir": str(tmp_path / "deep" / "run")})
    assert "failure" not in levels(doctor.check_machine(settings))
    assert not (tmp_path / "deep").exists()


def test_the_exit_code_says_whether_something_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    settings = config(model={"path": str(tmp_path)}, data={"train": str(tmp_path / "none.parquet")})
    assert doctor.run(settings) == 1
    shown = capsys.readouterr().out
    assert "There is no data file" in shown
    assert "only qwen3_vl is supported" in shown
    assert "Failures: 2" in shown
