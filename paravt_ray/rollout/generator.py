"""The generator: a Ray actor that runs the agent loop beside its own vLLM engine, whole groups at a time."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import sys
import tempfile
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paravt_ray.chat import Chat
from paravt_ray.config import Config, model_directory
from paravt_ray.episode import Group
from paravt_ray.errors import UserError
from paravt_ray.rollout.agent import run_group
from paravt_ray.rollout.canary import CanaryRun, run_canary
from paravt_ray.rollout.spec import GroupSpec
from paravt_ray.rollout.vllm_engine import VllmEngine
from paravt_ray.tools.offered import load_tools
from paravt_ray.weights.fetch import local_bytes
from paravt_ray.weights.push import Push

if TYPE_CHECKING:
    from tool_workers.pool import CropPool

LOG_TAIL_LINES = 30
_SCRATCH = "paravt-generator"


class GeneratorError(UserError):
    """A generator could not be started; the message ends with its log's last lines."""


@dataclass(frozen=True)
class GeneratorInfo:
    """Where a generator runs."""

    index: int
    host: str
    node_id: str
    pid: int
    gpus: tuple[str, ...]
    """Empty on CPU."""
    version: int
    """Of the weights it started with."""


class Generator:
    """The actor. All its methods are asynchronous and may run at the same time."""

    def __init__(self, config: Config, index: int, pool: CropPool, log_dir: str) -> None:
        """Send all output of this process and its children to `generator_NN.log`; `ready` starts the engine.

        Args:
            config: the run's; this node must be able to read `model.path`.
            index: of this generator.
            pool: the crop service.
            log_dir: folder for the log; made if it is missing.
        """
        self._config, self._index, self._pool = config, index, pool
        self._log = log_file(Path(log_dir), index)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        with self._log.open("ab") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        # vLLM leaves sockets and rendezvous files behind; in a folder of their own they go with the generator.
        self._scratch = make_scratch()
        os.environ["TMPDIR"] = tempfile.tempdir = self._scratch
        self._chat = Chat.from_pretrained(model_directory(config), config.model.frames_as)
        self._engine: VllmEngine | None = None

    async def ready(self) -> GeneratorInfo:
        """Start the engine.

        Raises:
            GeneratorError: it could not be started.
            ToolNameError: this machine has not the tools that are offered.
        """
        import ray

        load_tools(self._config.tools.offered)
        try:
            self._engine = await VllmEngine.start(self._config, self._chat)
        except Exception as error:  # vLLM's errors have no common base
            raise GeneratorError(
                f"The engine of generator {self._index} on {socket.gethostname()} could not be started: {error} "
                f"The last lines of {self._log}:\n{log_tail(self._log)}"
            ) from error
        context = ray.get_runtime_context()
        gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", [])))
        return GeneratorInfo(
            self._index, socket.gethostname(), context.get_node_id(), os.getpid(), gpus, self._engine.version
        )

    async def rollout_group(self, spec: GroupSpec) -> Group:
        """Roll out one prompt."""
        return await run_group(self._running, self._pool, self._chat, self._config, spec)

    async def update_weights(self, push: Push) -> int:
        """Load a pushed version and return it; running groups go on with it.

        Raises:
            WeightError: it could not be loaded; no work is done until a later push has succeeded.
        """
        async with local_bytes(push, self._config.rollout.push_timeout_s) as path:
            return await self._running.update_weights(push, path)

    async def sleep(self) -> None:
        """Give up the GPU's memory until `wake` or `update_weights`; who fails in either must be ended."""
        await self._running.sleep()

    async def wake(self) -> None:
        """Go on with the weights that the engine held."""
        await self._running.wake()

    async def canary(self) -> CanaryRun:
        """Generate the canary with the weights that are there now.

        Raises:
            EngineError: the engine gave no usable answer.
        """
        run = await run_canary(self._running, self._chat, self._config)
        run.generator = self._index
        return run

    async def health(self, timeout_s: float) -> int:
        """Return the version that the engine's process says it holds.

        Raises:
            EngineError: it does not answer, or holds no whole weights.
        """
        await self._running.check(timeout_s)
        return self._running.version

    async def shutdown(self) -> None:
        """End the engine and remove what it leaves behind."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.shutdown)
        shutil.rmtree(self._scratch, ignore_errors=True)

    @property
    def _running(self) -> VllmEngine:
        if self._engine is None:
            raise GeneratorError(f"Generator {self._index} was asked for work before it was ready.")
        return self._engine


def actor_options(config: Config, gpu: bool) -> dict[str, Any]:
    """Ray options of one generator: its resources, and the settings of the libraries in its processes."""
    env = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    if not gpu:
        # Ray would give an actor with one CPU one thread.
        threads = max(1, len(os.sched_getaffinity(0)) // config.rollout.generators)
        env |= {
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # waiting threads sleep, so that other processes on the same cores get them
            "TORCHDYNAMO_DISABLE": "1",  # compiling small helpers would delay the first answer by seconds
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # lets the model run in the scheduler's process: one start less
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # all engines of a node would bind themselves to the same cores
        }
    return {
        "num_cpus": 1,
        "num_gpus": config.rollout.tensor_parallel if gpu else 0,
        "max_restarts": 0,
        "max_concurrency": 1024,
        "runtime_env": {"env_vars": env},
    }


def make_scratch() -> str:
    """Make this process's folder for temporary files, and remove those of generators that were killed."""
    place = Path(tempfile.gettempdir())
    for folder in place.glob(f"{_SCRATCH}-*"):
        owner = folder.name.split("-")[2]
        if not Path("/proc", owner).exists():
            shutil.rmtree(folder, ignore_errors=True)
    return tempfile.mkdtemp(prefix=f"{_SCRATCH}-{os.getpid()}-", dir=place)


def log_file(log_dir: Path, index: int) -> Path:
    """Where generator `index` logs."""
    return log_dir / f"generator_{index:02d}.log"


def log_tail(file: Path) -> str:
    """The last lines of a log, indented; says so where it cannot be read from here."""
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            return "".join(f"  {line.rstrip()}\n" for line in deque(stream, LOG_TAIL_LINES))
    except OSError as error:
        return f"  (not readable from here: {error.strerror})\n"
