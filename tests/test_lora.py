"""LoRA: an adapter alone is trained, pushed and gone on from; written and served is the base with it merged in."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import scripted
import torch
from learning import largest_difference, make_config, make_learner, make_rows, weights

from paravt_ray.chat import Chat
from paravt_ray.config import Config, model_directory
from paravt_ray.episode import TrainRow
from paravt_ray.learner.actor import LearnerGroup
from paravt_ray.learner.checkpoint import read_tensors
from paravt_ray.learner.learner import Learner
from paravt_ray.learner.rows import build_rows
from paravt_ray.rollout.canary import canary_row, check_canary
from paravt_ray.rollout.fleet import GeneratorFleet
from paravt_ray.weights.lora import check_adapter, merge_into, merged
from paravt_ray.weights.manifest import checkpoint_digest, checkpoint_shapes
from paravt_ray.weights.push import WeightError
from paravt_ray.weights.send import unpublish

pytestmark = pytest.mark.usefixtures("one_thread")

RANK, ALPHA = 4, 8
LAYERS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
          "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
ADAPTED = {f"model.language_model.layers.{number}.{layer}" for number in range(2) for layer in LAYERS}
"""All linear layers of the tests' language model."""
EXACT = 1e-5
"""Largest difference of log-probs that float32 explains."""


def lora_config(**learner: Any) -> Config:
    return make_config(**{"lora_rank": RANK, "lora_alpha": ALPHA, **learner})


def lora_learner(path: Path, **learner: Any) -> Learner:
    return make_learner(path, lora_config(**learner))


@pytest.fixture(scope="module")
def saved(tiny_path: Path, tiny_chat: Chat, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint after two updates that changed much."""
    learner = lora_learner(tiny_path)
    for _ in range(2):
        learner.update(make_rows(tiny_chat))
    folder = tmp_path_factory.mktemp("saved") / "step_000002"
    learner.save(folder, {}, keep=1)
    learner.close()
    return folder


def text_logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.arange(5, 45)[None]).logits[0]
    return logits


def load(directory: Path) -> Any:
    from transformers import Qwen3VLForConditionalGeneration

    return Qwen3VLForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)


# ---- what is trained -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_every_linear_layer_of_the_language_model_is_adapted_and_nothing_else_is_trained(
    tiny_path: Path, tiny_rows: list[TrainRow], stage: int
) -> None:
    linear = {name for name, module in load(tiny_path).named_modules() if isinstance(module, torch.nn.Linear)}
    assert {name for name in linear if ".language_model." in name} == ADAPTED
    learner = lora_learner(tiny_path, zero_stage=stage)
    before = {name: tensor.clone() for name, tensor in learner._engine.trained_tensors()}
    assert before.keys() == {f"{name}.lora_{part}.weight" for name in ADAPTED for part in "AB"}
    for _ in range(2):  # B is 0 at first, so A gets its first gradient in the second step
        metrics = learner.update(tiny_rows)
    assert metrics["train/grad_norm"] > 0
    assert all(not torch.equal(tensor, before[name]) for name, tensor in learner._engine.trained_tensors())
    states = {name.partition(".")[2] for name, _ in learner._engine.optimizer_tensors()}
    assert states == before.keys()
    after, base = weights(learner), {name: tensor.numpy() for name, tensor in read_tensors(tiny_path)}
    learner.close()
    assert after.keys() == base.keys()
    changed = {name.removesuffix(".weight") for name in base if not np.array_equal(after[name], base[name])}
    assert changed == ADAPTED


def test_an_adapter_begins_as_the_base_to_the_last_bit_and_the_same_for_the_same_seed(
    tiny_path: Path, tiny_rows: list[TrainRow]
) -> None:
    base, found = make_learner(tiny_path, make_config()), []
    expected = base.logprobs(tiny_rows)
    base.close()
    for _ in range(2):
        torch.rand(1)  # whatever was drawn before
        learner = lora_learner(tiny_path)
        assert all(np.array_equal(values, expected[i]) for i, values in learner.logprobs(tiny_rows).items())
        learner.update(tiny_rows)
        found.append(weights(learner))
        learner.close()
    assert largest_difference(*found) == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 1},
        {"zero_stage": 2, "offload_optimizer": True},
        {"zero_stage": 3, "activation_checkpointing": True},
        {"zero_stage": 0, "micro_batch_tokens": 1},
    ],
    ids=str,
)
def test_how_memory_is_saved_changes_rounding_only(
    tiny_path: Path, tiny_rows: list[TrainRow], settings: dict[str, Any]
) -> None:
    results = []
    for more in ({}, settings):
        learner = lora_learner(tiny_path, **more)
        for _ in range(2):
            learner.update(tiny_rows)
        results.append(weights(learner))
        learner.close()
    assert largest_difference(*results) < 1e-4


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_the_reference_is_the_base_under_the_adapter_and_stays(
    tiny_path: Path, tiny_rows: list[TrainRow], stage: int, placement: str
) -> None:
    """Without a second model, also when it is asked in the middle of an update."""
    config = lora_config(zero_stage=stage, activation_checkpointing=True)
    config.algorithm.kl_coefficient, config.algorithm.kl_placement = 0.1, placement
    config.algorithm.kl_estimator = "k3"
    plain = make_learner(tiny_path, make_config(zero_stage=stage))
    expected = plain.logprobs(tiny_rows)
    plain.close()
    learner = make_learner(tiny_path, config, reference_path=tiny_path)
    assert isinstance(learner._reference.__self__, type(learner._engine))
    for _ in range(3):
        metrics = learner.update(tiny_rows)
        assert all(np.array_equal(values, expected[i]) for i, values in learner.reference_logprobs(tiny_rows).items())
    assert (metrics["train/kl"] > 1e-3) == (placement == "loss")
    assert not np.array_equal(learner.logprobs(tiny_rows)[0], expected[0])
    learner.close()


# ---- base and adapter together -------------------------------------------------------------------------------------


def test_merging_is_the_formula() -> None:
    weight, a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0], [10.0]])
    assert merged(weight, a, b, 0.5).tolist() == [[2.0, 1.0], [8.0, -1.0]]
    # Many small products in bfloat16: summed in float32, rounded once.
    a, b = torch.full((64, 1), 0.01, dtype=torch.bfloat16), torch.full((1, 64), 0.01, dtype=torch.bfloat16)
    exact = 1.0 + 2.0 * 64 * float(a[0, 0]) * float(b[0, 0])
    found = merged(torch.ones(1, 1), a, b, 2.0)
    assert found.dtype == torch.bfloat16 and found.item() == torch.tensor(exact).bfloat16().item()


def test_what_is_merged_is_what_peft_computes(tiny_path: Path, saved: Path, tiny_rows: list[TrainRow]) -> None:
    """Three ways to the same policy: `model/` as it is, `adapter/` in peft on the base, and the sum by hand."""
    from peft import PeftModel

    logits = text_logits(load(saved / "model"))
    adapted = PeftModel.from_pretrained(load(tiny_path), saved / "adapter")
    assert adapted.peft_config["default"].base_model_name_or_path == str(tiny_path)
    torch.testing.assert_close(text_logits(adapted), logits, atol=2e-5, rtol=1e-5)
    base = load(tiny_path)
    assert (text_logits(base) - logits).abs().max() > 0.1
    adapter = {name.removeprefix("base_model.model."): t for name, t in read_tensors(saved / "adapter")}
    stored = dict(read_tensors(saved / "model"))
    for name, weight in read_tensors(tiny_path):
        layer = name.removesuffix(".weight")
        by_hand = weight.numpy().astype(np.float64)
        if layer in ADAPTED:
            a, b = (adapter[f"{layer}.lora_{part}.weight"].numpy().astype(np.float64) for part in "AB")
            by_hand = by_hand + ALPHA / RANK * b @ a
        np.testing.assert_allclose(stored[name].numpy(), by_hand, atol=1e-6)
    found = []
    for source, config, resume in ((tiny_path, lora_config(), saved), (saved / "model", make_config(), None)):
        learner = make_learner(source, config, resume=resume)
        found.append(learner.logprobs(tiny_rows))
        learner.close()
    assert max(np.abs(found[0][index] - found[1][index]).max() for index in found[0]) < EXACT


def test_merging_again_and_again_starts_from_the_base(tiny_path: Path, saved: Path) -> None:
    """The last of many pushes is worth the same as one alone; no matrix is there before it is its turn."""
    adapter = {name.removeprefix("base_model.model."): t for name, t in read_tensors(saved / "adapter")}
    taken: list[str] = []

    def base() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in read_tensors(tiny_path):
            taken.append(name)
            yield name, tensor

    device = torch.device("cpu")
    for turn in range(3):
        tensors = {name: tensor * (turn - 1) for name, tensor in adapter.items()}  # the last turn's are the stored ones
        found = {}
        for name, tensor in merge_into(base(), tensors, ALPHA / RANK, device):
            assert taken[-1] == name
            found[name] = tensor
    assert all(torch.equal(found[name], tensor) for name, tensor in read_tensors(saved / "model"))


def test_an_adapter_that_does_not_fit_is_named(tiny_path: Path) -> None:
    base, (layer, other) = checkpoint_shapes(tiny_path), sorted(ADAPTED)[:2]
    out, into = base[f"{layer}.weight"]
    good = {f"{layer}.lora_A.weight": (4, into), f"{layer}.lora_B.weight": (out, 4)}
    check_adapter(base, good)
    for bad, message in (
        ({"lm_head.weight": (4, 4)}, r"unknown: lm_head\.weight"),
        ({"model.nowhere.lora_A.weight": (4, 4)}, r"unknown: model\.nowhere"),
        ({f"{layer}.lora_A.weight": (0,)}, f"unfit: {layer}"),  # what an ungathered ZeRO-3 parameter looks like
        ({f"{layer}.lora_B.weight": (out, 5)}, f"unfit: {layer}"),
        ({f"{other}.lora_A.weight": (4, into)}, rf"unfit: {other}\.lora_A"),  # without its B
    ):
        with pytest.raises(WeightError, match=message):
            check_adapter(base, good | bad)


def test_a_push_holds_the_adapter_alone_and_says_of_what(tiny_path: Path, tiny_rows: list[TrainRow]) -> None:
    pushes = []
    for config in (make_config(), lora_config()):
        learner = make_learner(tiny_path, config)
        learner.update(tiny_rows)
        pushes.append(learner.publish(3))
        learner.close()
    full, push = pushes
    assert push is not None and full is not None and full.adapter is None
    names = {entry.name for entry in push.tensors}
    assert names == {f"{name}.lora_{part}.weight" for name in ADAPTED for part in "AB"}
    shapes = checkpoint_shapes(tiny_path)
    values = sum(RANK * sum(shapes[f"{name}.weight"]) for name in ADAPTED)
    assert push.nbytes == 4 * values < full.nbytes / 4
    assert push.adapter is not None
    assert (push.adapter.scale, push.adapter.base) == (ALPHA / RANK, checkpoint_digest(tiny_path))
    unpublish()


# ---- going on ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "dtype"), [(0, "float32"), (3, "float32"), (2, "bfloat16"), (3, "bfloat16")])
def test_a_resumed_run_equals_the_unbroken_one_to_the_last_bit(
    tiny_path: Path, tiny_rows: list[TrainRow], tmp_path: Path, stage: int, dtype: str
) -> None:
    config = lora_config(zero_stage=stage)
    config.model.dtype = dtype
    unbroken = make_learner(tiny_path, config)
    for step in range(4):
        metrics = unbroken.update(tiny_rows)
        if step == 1:
            unbroken.save(tmp_path / "step_000002", {}, keep=2)
    expected = {name: tensor.clone() for name, tensor in unbroken._engine.trained_tensors()}
    assert {tensor.dtype for tensor in expected.values()} == {getattr(torch, dtype)}
    unbroken.close()
    stored = {name.partition(".")[0] for name, _ in read_tensors(tmp_path / "step_000002" / "optimizer")}
    assert stored == {"exp_avg", "exp_avg_sq"} | ({"master"} if dtype == "bfloat16" else set())

    resumed = make_learner(tiny_path, config, resume=tmp_path / "step_000002")
    for _ in range(2):
        again = resumed.update(tiny_rows)
    assert again["train/loss"] == metrics["train/loss"]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed._engine.trained_tensors())
    resumed.close()


def test_the_adapter_says_what_it_needs(saved: Path) -> None:
    described = json.loads((saved / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    assert (described["peft_type"], described["r"], described["lora_alpha"]) == ("LORA", RANK, ALPHA)
    assert sorted(file.name for file in (saved / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert not (saved / "model" / "adapter_config.json").exists()


# ---- for real ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(
    cluster: None, tiny_path: Path, tiny_rows: list[TrainRow], tmp_path: Path
) -> None:
    config = lora_config(zero_stage=3, ranks=2, micro_batch_tokens=700)
    config.algorithm.kl_coefficient = 0.05
    alone = lora_learner(tiny_path)
    base = alone.logprobs(tiny_rows)
    with LearnerGroup(config, tiny_path) as group:
        for batch in (tiny_rows, tiny_rows[:1]):  # one rank has nothing at all to do in the second
            together, one = group.update(batch), alone.update(batch)
            assert together["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-3, abs=1e-6)
        group.add_reference_logprobs(tiny_rows)
        assert all(np.allclose(row.reference_logprobs, base[i], atol=1e-5) for i, row in enumerate(tiny_rows))
        group.save(tmp_path / "step_000002", {}, keep=1)
        stored = {name: tensor.numpy() for name, tensor in read_tensors(tmp_path / "step_000002" / "model")}
        assert largest_difference(stored, weights(alone)) < 3e-4
        alone.close()
        push = group.publish(2)
        assert push.adapter is not None and {len(entry.shape) for entry in push.tensors} == {2}
        assert {min(entry.shape) for entry in push.tensors} == {RANK}


@pytest.mark.slow
def test_generators_serve_base_and_adapter_also_after_a_restart(cluster: None, tmp_path: Path) -> None:
    """The shipped model through learner, push and vLLM: exact after every push, and in a killed engine's successor."""
    config = lora_config(lora_rank=2, lr=3e-3)
    config.model = replace(config.model, context_length=2048)
    config.rollout = replace(
        config.rollout, kv_cache_gb=0.1, max_new_tokens=48, subagent_max_new_tokens=16, start_timeout_s=300.0
    )
    model = model_directory(config)
    rows = make_rows(Chat.from_pretrained(model))
    whole = sum(4 * int(np.prod(shape)) for shape in checkpoint_shapes(model).values())
    ray.cloudpickle.register_pickle_by_value(scripted)

    def specs(version: int) -> list[Any]:
        return [scripted.spec(group_id=f"v{version}/{n}", group_size=4) for n in range(2)]

    with LearnerGroup(config, model) as learner, GeneratorFleet(config, scripted.ScriptedPool(), tmp_path) as fleet:  # type: ignore[arg-type]

        def gap(version: int) -> float:
            runs = fleet.canary()
            return check_canary(runs, learner.logprobs([canary_row(run) for run in runs]), version, "float32")

        def served(groups: Sequence[Any], version: int) -> float:
            """Mean |generator - learner| log-prob of whole episodes."""
            found = build_rows(groups, config)
            assert {e.policy_version for group in groups for e in group.episodes} == {version}
            learned = learner.logprobs(found)
            return float(
                np.concatenate(
                    [
                        np.abs(row.behaviour_logprobs - ours)[row.generated]
                        for row, ours in zip(found, learned, strict=True)
                    ]
                ).mean()
            )

        (info,) = fleet.wait_started()
        spread = []
        for version in range(4):
            push = learner.publish(version)
            assert push.adapter is not None and push.nbytes < whole / 10
            fleet.push_weights(push)
            assert gap(version) < EXACT
            assert served(fleet.submit(specs(version)).all(), version) < EXACT
            spread.append(learner.logprobs(rows)[0])
            learner.update(rows)
        assert np.abs(spread[3] - spread[0]).max() > 0.05, "the pushes changed nothing that could be seen"

        learner_now = learner.publish(4)
        fleet.push_weights(learner_now)
        family = [psutil.Process(info.pid), *psutil.Process(info.pid).children(recursive=True)]
        batch = fleet.submit(specs(4))
        os.kill(info.pid, signal.SIGKILL)
        assert not psutil.wait_procs(family, timeout=10)[1]
        groups = batch.all()
        assert fleet.status()[0].restarts == 1
        assert all(len(group.episodes) == 4 and not group.failures for group in groups)
        assert served(groups, 4) < EXACT
        assert gap(4) < EXACT
