"""The one configuration tree: frozen, typed, read from TOML with `--set section.key=value` overrides.

No torch, and no I/O beyond the caller's text and `check`'s look at the paths a configuration names. Stages take
values out of the tree; nothing below `wiring.py` sees the tree itself.
"""

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", strict=False)

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Run:
    name: str = "run"
    folder: str = "runs"
    seed: NonNegative = 0
    tensorboard: bool = True  # written when the package is installed


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Lora:
    rank: Positive = 16
    alpha: PositiveFloat = 32.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Tiny:
    """A Llama made on the spot, with a word-level tokenizer of the world's vocabulary."""

    width: Positive = 96
    layers: Positive = 3
    heads: Positive = 4
    kv_heads: Positive = 2
    context: Positive = 512


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Model:
    """`path`: a Hugging Face folder, a checkpoint of ours, "smollm2-135m", or "tiny" (made on the spot)."""

    path: str = "tiny"
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    lora: Lora | None = None
    tiny: Tiny = field(default_factory=Tiny)
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Engine:
    """`kv_tokens` None: room for `max_rows` sequences of the longest prompt plus completion that the run can ask for."""

    type: Literal["embedded", "generate"] = "embedded"
    max_rows: Positive = 32
    kv_tokens: Positive | None = None
    piece_tokens: Positive = 128


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Source:
    """Where tasks or conversations come from.

    type = "world": `name` of a built-in world, `size` tasks from `seed`, `options` of the world;
    "jsonl", "parquet", "dataset" (a folder written by `datasets.save_to_disk`): `path`, `columns` maps our names
    (prompt, messages, answer, id) to theirs; "reasoning_gym": `name`, `size`, `seed`, `options`;
    "python": `path` is "file.py:function" which returns an iterable of rows.
    """

    type: Literal["world", "jsonl", "parquet", "dataset", "reasoning_gym", "python"]
    path: str | None = None
    name: str | None = None
    size: Positive = 1000
    seed: NonNegative = 0
    weight: PositiveFloat = 1.0
    columns: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    system: str | None = None  # put before every conversation that has no system message


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Schedule:
    """Learning rate over training steps: linear warm-up, then constant, linear or cosine down to `final` x peak."""

    type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: NonNegative = 0
    final: Share = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Optimizer:
    learning_rate: PositiveFloat = 1e-5
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_norm: NonNegativeFloat = 1.0
    max_norm: NonNegativeFloat = 0.0  # above this the update is skipped; 0: only non-finite gradients are skipped
    max_skips: Positive = 5  # skipped updates in a row that end the run
    schedule: Schedule = field(default_factory=Schedule)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Sft:
    steps: Positive
    batch_size: Positive = 32
    sources: tuple[Source, ...]
    held_out: Source | None = None  # loss on it is reported with every evaluation
    max_tokens: Positive = 1024  # longer conversations are cut, and counted
    micro_batch_tokens: Positive = 8192
    optimizer: Optimizer = field(default_factory=Optimizer)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class RewardTerm:
    """`fn`: "env" (what the world gave), "exact_match", "reasoning_gym", or "file.py:function"."""

    fn: str
    weight: float = 1.0
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Filter:
    """Groups that a filter rejects are replaced by new ones. `fn`: "reward_spread", "length", or "file.py:function"."""

    fn: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Async:
    """`max_staleness` (eta): how many versions old a trained token may be; 0 is synchronous training."""

    max_staleness: Annotated[int, Field(ge=0)] = 0
    max_running: Positive | None = None  # groups in flight; None: as many as the staleness bound admits
    task_timeout_s: PositiveFloat = 600.0
    max_consecutive_drops: Positive = 64


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Sampling:
    temperature: PositiveFloat = 1.0
    top_p: Share = 1.0
    top_k: Positive | None = None
    min_p: Share = 0.0
    stop_strings: tuple[str, ...] = ()
    max_tokens: Positive = 64  # of one turn


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Rl:
    """A training step takes `groups` groups of `group_size` episodes and makes `minibatches` optimiser updates."""

    steps: Positive
    groups: Positive = 8
    group_size: Positive = 8
    minibatches: Positive = 1
    tasks: Source
    rewards: tuple[RewardTerm, ...] = (RewardTerm(fn="env"),)
    generate_fn: str | None = None  # "file.py:function": a user's own rollout in place of the episode worker
    max_turns: Positive = 16
    max_prompt_tokens: Positive = 512  # tasks with longer prompts are left out, and counted
    max_episode_tokens: Positive = 1024
    sampling: Sampling = field(default_factory=Sampling)
    allow_truncated_sampling: bool = False
    credit: str = "grpo"  # grpo, dr_grpo, rloo
    loss: str = "ppo"  # ppo, importance_sampling, or "file.py:function"
    loss_params: dict[str, float] = field(default_factory=dict)
    weighting: str = "token_mean"  # token_mean, sequence_mean, constant
    filters: tuple[Filter, ...] = ()
    max_resamples: Positive = 64  # groups rejected in a row before the run stops
    sync_every: Positive = 1
    micro_batch_tokens: Positive = 8192
    optimizer: Optimizer = field(default_factory=Optimizer)
    asynchronous: Async = field(default_factory=Async)


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Eval:
    """Held-out evaluation: `samples` episodes for each of `tasks` tasks with fixed seeds; pass@1 and pass@samples."""

    every: NonNegative = 0  # training steps; 0: only at the end of a stage
    source: Source | None = None
    tasks: Positive = 64
    samples: Positive = 1
    temperature: PositiveFloat = 1.0
    seed: NonNegative = 12345


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Checkpoint:
    every: NonNegative = 0  # training steps; 0: only at the end of a stage
    keep_last: Positive = 2
    keep_every: NonNegative = 0  # 0: none besides the last and the best
    deadline_s: PositiveFloat = 120.0  # for the checkpoint that SIGTERM asks for


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Config:
    run: Run = field(default_factory=Run)
    model: Model = field(default_factory=Model)
    engine: Engine = field(default_factory=Engine)
    sft: Sft | None = None
    rl: Rl | None = None
    eval: Eval = field(default_factory=Eval)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
