"""Every key of the configuration, its meaning beside it, its default, and in two tables what it may be."""

from __future__ import annotations

from dataclasses import dataclass, field

SHIPPED_MODELS = ("tiny", "tiny_strong", "tiny_weak")


@dataclass
class ModelConfig:
    """Which model is trained and how it sees frames."""

    path: str = SHIPPED_MODELS[0]
    """Directory of a Qwen3-VL checkpoint in Hugging Face format. `tiny` ships with the package, and so do the cold
    starts of `make paradox`: `tiny_strong`, and `tiny_weak`, which has seen hardly any calls before its own."""
    dtype: str = "bfloat16"
    """Weights and activations in generators and learner: `float32` or `bfloat16`."""
    context_length: int = 32768
    """Longest sequence in tokens, prompt and all turns together."""
    overview_max_pixels: int = 50176
    """Largest overview frame in pixels after resizing."""
    crop_max_pixels: int = 50176
    """Largest crop frame in pixels after resizing."""
    min_pixels: int = 784
    """Smallest frame in pixels after resizing."""
    frames_as: str = "images"
    """How a video's frames are shown, in SFT, RL, evaluation and `paravt ask` alike. `images`: each as an image after
    its time; `video`: two together after their mean time, as Qwen3-VL's processor shows a video, for half the tokens.
    """


@dataclass
class DataConfig:
    """Which questions are asked."""

    train: str = ""
    """Parquet file with training samples: questions for `paravt train`, conversations for `paravt sft`."""
    valid: str = ""
    """Parquet file with held-out samples of the same kind; empty for none."""
    video_root: str = ""
    """Folder that relative video paths start from; empty for the parquet file's own folder."""
    max_unusable: float = 0.0
    """Share of rows that may be unusable (missing video, no answer, ...) before the run is refused."""


@dataclass
class RolloutConfig:
    """How episodes are produced."""

    generators: int = 1
    """vLLM engines."""
    tensor_parallel: int = 1
    """GPUs of one engine."""
    gpu_memory_utilization: float = 0.85
    """Share of a GPU that an engine may use (GPU only)."""
    kv_cache_gb: float = 1.0
    """Memory for keys and values of one engine (CPU only)."""
    prompts_per_step: int = 7
    group_size: int = 8
    """Episodes of one prompt."""
    temperature: float = 0.7
    max_new_tokens: int = 2048
    """Tokens of one assistant turn."""
    max_tool_turns: int = 3
    """Turns that may call tools; then an answer is forced. 0: the prompt does not offer the tool."""
    max_calls_per_turn: int = 5
    max_calls_per_episode: int = 15
    max_invalid_turns: int = 3
    """Turns in a row whose calls are all invalid before the episode is ended."""
    dispatch: str = "parallel"
    """`parallel`, or `sequential`: at most one call a turn."""
    reply: str = "summary"
    """`summary`: a sub-agent's text; `frames`: the crop's frames themselves."""
    think_prefix: bool = True
    """Begin every turn of the main agent with the forced tokens `<think>\\n`."""
    gating: bool = True
    """Draw each prompt's overview budget K from `frame_budgets` instead of always `overview_frames`."""
    frame_budgets: list[int] = field(default_factory=lambda: [4, 8, 16, 32, 64])
    overview_frames: int = 64
    """K where gating is off, and in `paravt eval` and `paravt ask`."""
    train_subagents: bool = True
    """Put the sub-agents' tokens into the loss with their episode's advantage."""
    subagent_max_new_tokens: int = 512
    """Longest summary in tokens."""
    staleness: int = 0
    """Versions by which generators may run ahead of the learner; 0 is the synchronous loop."""
    concurrency: int = 64
    """Episodes in flight on one generator."""
    turn_timeout_s: float = 300.0
    episode_timeout_s: float = 900.0
    start_timeout_s: float = 900.0
    """Deadline for an engine to start."""
    push_timeout_s: float = 300.0
    """Deadline for one engine to load pushed weights, and with `cluster.colocate` to go to sleep or to wake."""
    max_restarts: int = 3
    """Times one generator that died is started again before the run is given up on it."""
    min_group_size: int = 2
    """A group that has fewer finished episodes is left out of the step."""
    dynamic_sampling: int = 0
    """Most rounds of a step in which groups without signal (too few episodes, or all with the same rewards) are
    replaced by groups of further prompts (DAPO); 0 trains on whatever the step's own prompts give."""


@dataclass
class ToolsConfig:
    """What the model can call, and the video-crop service that serves it."""

    offered: list[str] = field(default_factory=lambda: ["crop_video"])
    """Tools by name: those that are shipped (`crop_video`), others as `package.module:OBJECT`, which is imported on
    every machine. To offer none, set `rollout.max_tool_turns=0`."""
    workers: int = 4
    crop_fps: float = 1.0
    """Frames per second of a crop."""
    crop_max_frames: int = 16
    crop_timeout_s: float = 30.0
    cache_mb: int = 512
    """Decoded frames that one worker keeps."""
    queue_limit: int = 1024
    """Calls waiting for one worker before further ones are refused."""


@dataclass
class RewardConfig:
    """R = R_acc + format_weight * R_fmt + R_tool (paper, section 4)."""

    format_weight: float = 1.0
    anchor_weight: float = 0.5
    """Lambda: weight of R_anchor inside R_fmt; 0 switches the selective anchor off."""
    unclosed_penalty: float = 0.3
    """Gamma: what `<think>` that is never closed costs R_anchor."""
    answer_suffix: bool = True
    """Credit a final non-empty answer block even where the rest is imperfect."""
    tool: bool = True
    """Whether R_tool is part of the reward."""
    open_ended: str = "f1"
    """Score of open-ended answers: `f1` or `exact` on their words, or `judge`: a chat model's."""
    judge_url: str = ""
    """OpenAI-compatible endpoint of the judge, as `http://HOST:8000/v1`. Its key, where it wants one, is read from the
    environment variable `JUDGE_API_KEY` of the process that is started, and from nowhere else."""
    judge_model: str = ""
    """Name of the judge's model at that endpoint."""
    judge_concurrency: int = 16
    """Judgements that one reward actor asks for at one time."""
    judge_retries: int = 3
    """Times that a judgement is asked for again after status 429 or 5xx, a timeout or a lost connection."""
    workers: int = 1
    """Reward actors."""
    timeout_s: float = 60.0
    """Deadline for scoring what one actor was given, and for one judgement with all its retries."""


@dataclass
class AlgorithmConfig:
    """From rewards to the loss."""

    advantage: str = "mean_std"
    """`mean_std`, `mean` or `leave_one_out`, within a group."""
    batch_normalise: bool = True
    """Normalise advantages over the batch after the group."""
    anchoring_scope: str = "structural"
    """Where the format advantage is placed: `structural` (tag tokens only) or `all` generated tokens."""
    loss: str = "ppo"
    """`ppo`, `gspo` or `cispo`."""
    aggregation: str = "token_mean"
    """`token_mean`, `sequence_mean` or `dr_grpo`."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    behaviour_cap: float = 5.0
    """Largest weight that corrects for the generator's policy being older than the proximal one."""
    behaviour_correction: str = "truncate"
    """What happens to a larger weight: `truncate` cuts it to the cap, `mask` drops the token's gradient."""
    kl_coefficient: float = 0.01
    """0 switches the reference model off."""
    kl_estimator: str = "k1"
    """`k1`, `k2` or `k3` (Schulman 2020)."""
    kl_placement: str = "reward"
    """`reward` or `loss`."""
    entropy_coefficient: float = 0.0


@dataclass
class LearnerConfig:
    """The DeepSpeed learner."""

    ranks: int = 1
    zero_stage: int = 2
    """DeepSpeed ZeRO, what is spread over ranks: 1 the optimizer state, 2 gradients too, 3 weights too; 0 nothing."""
    offload_optimizer: bool = False
    """Keep the optimizer state in the CPU's memory and make its step there."""
    activation_checkpointing: bool = False
    """Keep each layer's inputs only and compute its activations again in the backward pass."""
    lr: float = 2e-6
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0; afterwards the rate is constant (or `schedule`)."""
    schedule: str = "constant"
    """`constant` or `cosine` (to 0 at the last step)."""
    beta1: float = 0.9
    beta2: float = 0.999
    weight_decay: float = 0.01
    grad_clip: float = 1.0
    lora_rank: int = 0
    """Rank of a LoRA adapter on all linear layers of the language model, which alone is trained and pushed; 0 trains
    all weights. It usually wants a larger `lr`."""
    lora_alpha: int = 32
    """Weight of the adapter: its product is added to the base's weights times `lora_alpha` / `lora_rank`."""
    updates_per_step: int = 1
    """Optimizer steps on one batch of rollouts."""
    micro_batch_tokens: int = 32768
    """Tokens of one forward and backward pass."""
    logprob_chunk_tokens: int = 1024
    """Positions whose full-vocabulary logits exist at one time."""
    timeout_s: float = 1800.0
    """Deadline of one learner call (an update, a save)."""


@dataclass
class SftConfig:
    """Supervised cold start (`paravt sft`)."""

    output: str = "outputs/sft"
    epochs: int = 1
    steps: int = 0
    """Optimizer steps; 0 for as many as `epochs` take."""
    batch_size: int = 16
    """Samples of one optimizer step, over all ranks."""
    max_skipped: float = 0.05
    """Share of rows that may be skipped before the run is refused."""


@dataclass
class TrainerConfig:
    """The loop."""

    steps: int = 54
    seed: int = 0
    run_dir: str = "outputs/run"
    resume: str = "never"
    """`never`: refuse a run directory that holds a run; `auto`: go on from its newest complete checkpoint."""
    save_every: int = 5
    """Steps between checkpoints; 0 saves only at the end."""
    keep_checkpoints: int = 2
    eval_every: int = 0
    """Steps between held-out evaluations; 0 evaluates only before and after."""
    eval_samples: int = 0
    """Held-out samples of one evaluation; 0 takes all."""
    eval_budgets: list[int] = field(default_factory=list)
    """Frame budgets K at each of which every held-out sample is asked; empty for the one that training would use."""


@dataclass
class EvalConfig:
    """Benchmarks (`paravt eval`), at temperature 0; the rest of the protocol is `rollout`, `tools` and `model`."""

    split: str = "rl"
    """One of the paper's splits (`videomme`, `videomme_subtitles`, `longvideobench`, `lvbench`, `mlvu`, `mmvu`,
    `charades`), or `rl`: questions in the format of `data.valid`."""
    data: str = ""
    """Local copy of the split as it was released: a parquet, JSON or JSONL file, or a folder of parquet files; empty
    for `data.valid` (`rl` only)."""
    video_root: str = ""
    """Folder that the split's video names start from; empty for that of `data`."""
    subtitles: str = ""
    """Folder with `VIDEO.srt` (`videomme_subtitles` only)."""
    subtitle_tokens: int = 8192
    """Most tokens of one video's subtitles; longer ones are thinned out evenly."""
    tools: bool = True
    """Off: the prompt does not offer the tool and the first turn is the answer."""
    mcq_answer_tokens: int = 64
    """Longest forced answer to a multiple-choice question, after the last tool turn."""
    other_answer_tokens: int = 128
    """Longest forced answer to any other question."""
    samples: int = 0
    """Questions to ask, from the first on; 0 for all."""
    results: str = "outputs/eval"
    """Folder for results, tables and samples for lmms-eval. What it holds of the same model, protocol and question is
    not asked again."""


@dataclass
class ParadoxConfig:
    """The comparison of the method's parts (`paravt paradox`)."""

    seeds: int = 3
    """Runs of each arm, with the seeds from `trainer.seed` on."""
    weak_model: str = ""
    """Checkpoint with a weak tool prior, for the contrast with `model.path`; empty leaves the contrast out."""
    prompts: int = 24
    """Questions that the cold start is measured on at each frame budget and at each temperature."""
    temperatures: list[float] = field(default_factory=lambda: [0.0, 0.7, 1.0, 1.3])
    """Temperatures at which it is counted how many closing tags survive; 0 is greedy."""
    output: str = ""
    """Folder for the figures, the tables and the records that they are drawn from; empty for `comparison` in
    `trainer.run_dir`. Records of runs that it holds are replaced."""


@dataclass
class TrackingConfig:
    """MLflow."""

    uri: str = ""
    """Tracking server; empty for SQLite beside the run directories (`outputs/mlflow.db`)."""
    experiment: str = "paravt"
    traces_per_step: int = 4
    """Episodes of each step that become MLflow traces: turns, calls, crops and sub-agents with their durations; 0 for
    none. All of them are in the run directory anyway."""


@dataclass
class ClusterConfig:
    """The Ray cluster."""

    address: str = ""
    """`auto` or an address to join a running cluster; empty to start one on this machine for this run."""
    cpus: int = 0
    """Logical CPUs of a cluster that the run starts itself; 0 for as many as its actors ask for, but at least 16."""
    object_store_gb: float = 1.0
    """Object store of a cluster that the run starts itself."""
    colocate: bool = False
    """Generators and learner ranks share GPUs in pairs and take turns: engines sleep while the learner computes, and
    its weights and optimizer state wait in the CPU's memory while they sample. Only with `rollout.staleness=0`,
    `rollout.tensor_parallel=1`, and `learner.zero_stage=2`, or 3 with `learner.offload_optimizer` and without LoRA.
    Not yet run on a GPU."""


@dataclass
class Config:
    """Everything."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    paradox: ParadoxConfig = field(default_factory=ParadoxConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)


CHOICES: dict[str, tuple[str, ...]] = {
    "model.dtype": ("float32", "bfloat16"),
    "model.frames_as": ("images", "video"),
    "rollout.dispatch": ("parallel", "sequential"),
    "rollout.reply": ("summary", "frames"),
    "reward.open_ended": ("f1", "exact", "judge"),
    "algorithm.advantage": ("mean_std", "mean", "leave_one_out"),
    "algorithm.anchoring_scope": ("structural", "all"),
    "algorithm.loss": ("ppo", "gspo", "cispo"),
    "algorithm.aggregation": ("token_mean", "sequence_mean", "dr_grpo"),
    "algorithm.behaviour_correction": ("truncate", "mask"),
    "algorithm.kl_estimator": ("k1", "k2", "k3"),
    "algorithm.kl_placement": ("reward", "loss"),
    "learner.schedule": ("constant", "cosine"),
    "trainer.resume": ("never", "auto"),
    "eval.split": (
        "rl",
        "videomme",
        "videomme_subtitles",
        "longvideobench",
        "lvbench",
        "mlvu",
        "mmvu",
        "charades",
    ),
}

# Smallest and largest value that makes sense; None leaves that side open.
RANGES: dict[str, tuple[float | None, float | None]] = {
    "model.context_length": (64, None),
    "model.overview_max_pixels": (1, None),
    "model.crop_max_pixels": (1, None),
    "model.min_pixels": (1, None),
    "data.max_unusable": (0, 1),
    "rollout.generators": (1, None),
    "rollout.tensor_parallel": (1, None),
    "rollout.gpu_memory_utilization": (0.05, 1),
    "rollout.kv_cache_gb": (0.05, None),
    "rollout.prompts_per_step": (1, None),
    "rollout.group_size": (1, None),
    "rollout.temperature": (0.01, 10),
    "rollout.max_new_tokens": (1, None),
    "rollout.max_tool_turns": (0, None),
    "rollout.max_calls_per_turn": (1, None),
    "rollout.max_calls_per_episode": (1, None),
    "rollout.max_invalid_turns": (1, None),
    "rollout.overview_frames": (1, None),
    "rollout.subagent_max_new_tokens": (1, None),
    "rollout.staleness": (0, None),
    "rollout.concurrency": (1, None),
    "rollout.turn_timeout_s": (0.1, None),
    "rollout.episode_timeout_s": (0.1, None),
    "rollout.start_timeout_s": (1, None),
    "rollout.push_timeout_s": (1, None),
    "rollout.max_restarts": (0, None),
    "rollout.min_group_size": (1, None),
    "rollout.dynamic_sampling": (0, None),
    "tools.workers": (1, None),
    "tools.crop_fps": (0.01, None),
    "tools.crop_max_frames": (1, None),
    "tools.crop_timeout_s": (0.1, None),
    "tools.cache_mb": (0, None),
    "tools.queue_limit": (1, None),
    "reward.format_weight": (0, None),
    "reward.judge_concurrency": (1, None),
    "reward.judge_retries": (0, None),
    "reward.workers": (1, None),
    "reward.timeout_s": (0.1, None),
    "algorithm.clip_low": (0, 1),
    "algorithm.clip_high": (0, None),
    "algorithm.behaviour_cap": (1, None),
    "algorithm.kl_coefficient": (0, None),
    "learner.ranks": (1, None),
    "learner.zero_stage": (0, 3),
    "learner.lr": (0, None),
    "learner.warmup_steps": (0, None),
    "learner.beta1": (0, 1),
    "learner.beta2": (0, 1),
    "learner.weight_decay": (0, None),
    "learner.grad_clip": (0, None),
    "learner.lora_rank": (0, 256),
    "learner.lora_alpha": (1, None),
    "learner.updates_per_step": (1, None),
    "learner.micro_batch_tokens": (1, None),
    "learner.logprob_chunk_tokens": (1, None),
    "learner.timeout_s": (1, None),
    "sft.epochs": (1, None),
    "sft.steps": (0, None),
    "sft.batch_size": (1, None),
    "sft.max_skipped": (0, 1),
    "trainer.steps": (1, None),
    "trainer.seed": (0, None),
    "trainer.save_every": (0, None),
    "trainer.keep_checkpoints": (1, None),
    "trainer.eval_every": (0, None),
    "trainer.eval_samples": (0, None),
    "eval.subtitle_tokens": (0, None),
    "eval.mcq_answer_tokens": (1, None),
    "eval.other_answer_tokens": (1, None),
    "eval.samples": (0, None),
    "paradox.seeds": (1, 10),
    "paradox.prompts": (1, None),
    "tracking.traces_per_step": (0, 64),
    "cluster.cpus": (0, None),
    "cluster.object_store_gb": (0.1, None),
}
