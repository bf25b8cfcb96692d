"""A generator whose words come from a script and whose everything else is real, as a Ray actor without vLLM.

The agent loop, the parser, the crop service and the records are those of any run. Workers import this module by name,
so their PYTHONPATH must have this folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from scripted import Request, ScriptedEngine, answer_text, by_turn, calls_text

from paravt_ray.chat import Chat
from paravt_ray.config import Config, model_directory
from paravt_ray.episode import Group
from paravt_ray.rollout.agent import run_group
from paravt_ray.rollout.canary import CanaryRun, run_canary
from paravt_ray.rollout.generator import GeneratorInfo, log_file
from paravt_ray.rollout.handle import RayGenerator
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.weights.push import Push
from tool_workers.pool import CropPool

TESTS = Path(__file__).parent


def _say(request: Request) -> str:
    """Two calls, two more, then an answer that differs from rollout to rollout."""
    answer = answer_text("AB"[request.sampling.seed % 2])
    return str(by_turn(calls_text((1, 4), (6, 9)), calls_text((11, 14), (16, 19)), answer)(request))


class ScriptedGenerator:
    """The actor."""

    def __init__(self, config: Config, index: int, pool: CropPool, turn_s: float) -> None:
        """Every turn takes `turn_s` seconds."""
        self._config, self._index, self._pool = config, index, pool
        self._chat = Chat.from_pretrained(model_directory(config))
        self._engine = ScriptedEngine(self._chat, _say, delay_s=turn_s, version=0)

    async def ready(self) -> GeneratorInfo:
        node = ray.get_runtime_context().get_node_id()
        return GeneratorInfo(self._index, "here", node, os.getpid(), (), self._engine.version)

    async def rollout_group(self, spec: GroupSpec) -> Group:
        return await run_group(self._engine, self._pool, self._chat, self._config, spec)

    async def update_weights(self, push: Push) -> int:
        self._engine.version = push.version
        return push.version

    async def sleep(self) -> None:
        pass

    async def wake(self) -> None:
        pass

    async def canary(self) -> CanaryRun:
        run = await run_canary(self._engine, self._chat, self._config)
        run.generator = self._index
        return run

    async def health(self, timeout_s: float) -> int:
        return self._engine.version

    async def shutdown(self) -> None:
        pass


class ScriptedHandle(RayGenerator):
    """The actor as the fleet sees it, on a certain node as long as that lives."""

    def __init__(self, config: Config, index: int, pool: CropPool, logs: Path, node_id: str, turn_s: float) -> None:
        self._index, self._log = index, log_file(logs, index)
        options: dict[str, Any] = {
            "num_cpus": 1,
            "max_concurrency": 1024,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=True),
            "runtime_env": {"env_vars": {"PYTHONPATH": f"{TESTS}:{TESTS.parent}", "OMP_NUM_THREADS": "1"}},
        }
        self._actor = ray.remote(ScriptedGenerator).options(**options).remote(config, index, pool, turn_s)
