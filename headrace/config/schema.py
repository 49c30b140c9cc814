"""The tree of frozen dataclasses that a TOML file fills. No logic: the limits of a value are in its type.

The comment behind a field (or on the line above it) is its entry in the table of `docs/configuration.md`.
"""

from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

STRICT = ConfigDict(extra="forbid", strict=False)  # lists become tuples; numbers, flags and text are strict by type

Flag = Annotated[bool, Field(strict=True)]
FlagOrAuto = Annotated[Flag | Literal["auto"], Field(description='true, false or "auto"')]
Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Positive = Annotated[int, Field(strict=True, gt=0)]
NonNegative = Annotated[int, Field(strict=True, ge=0)]
PositiveFloat = Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]
NonNegativeFloat = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0)]
Factor = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=1)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**63, description="a whole number from 0 to 2**63 - 1")]
Temperature = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=1e-4)]
Nucleus = Annotated[float, Field(strict=True, gt=0, le=1, description="a number above 0 and at most 1")]
Text = Annotated[str, Field(min_length=1, description="text in quotes, not empty")]
Port = Annotated[int, Field(strict=True, ge=0, le=65535)]
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LayerNames = Annotated[
    tuple[str, ...] | Literal["all-linear"], Field(description='a list, each text in quotes, or "all-linear"')
]
Staleness = Annotated[
    int,
    Field(strict=True, ge=0, description="0 (synchronous training) or the number of versions a token may be old"),
]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class RunConfig:
    """Name, folder and seed of a run."""

    name: str = "run"  # the run folder is `<folder>/<name>_<UTC time>`
    folder: str = "runs"  # where run folders are made, relative to the current folder
    seed: Seed = 0  # seeds everything random in the run
    tensorboard: Flag = True  # written when the package is installed
    # steps between two lines of progress and two records in TensorBoard and metrics.sinks; metrics.jsonl has all steps
    log_every: Positive = 1
    deterministic: Flag = False  # cuda: the same bits in every run of a synchronous configuration, at some speed
    stall_warn_s: PositiveFloat = 300.0  # what makes no progress for so long is told in the log, with all stacks
    # what makes no progress for so long ends the run with code 75, to be resumed; 0: never
    stall_end_s: NonNegativeFloat = 3600.0
    # a start of the run, or a loading of models, that takes so long ends it in the same way; 0: never
    load_end_s: NonNegativeFloat = 14400.0
    # rl: a run whose advantages were all 0 in so many training steps in a row ends with the cause, code 1; 0: never
    stop_without_signal: NonNegative = 20


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class LoraConfig:
    """Low-rank adapters that are trained in place of the model's parameters."""

    rank: Positive = 16  # of the two factors; at most the width of the model
    alpha: PositiveFloat = 32.0  # the update is scaled by alpha / rank
    rslora: Flag = False  # scale by alpha / sqrt(rank) instead
    # names of the linear layers that get an adapter; "all-linear": all but the output head
    targets: LayerNames = ALL_LINEAR

    @property
    def scaled_alpha(self) -> float:
        """The alpha with which the usual scale, alpha / rank, is the configured one."""
        return self.alpha * self.rank**0.5 if self.rslora else self.alpha

    @property
    def layers(self) -> tuple[str, ...]:
        """The names of the layers; those of all supported models for "all-linear"."""
        return ALL_LINEAR if isinstance(self.targets, str) else self.targets


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class TinyModelConfig:
    """A Llama made on the spot, with a word-level tokenizer of the environment's vocabulary."""

    width: Positive = 96  # a multiple of two times `heads`
    layers: Positive = 3  # number of decoder layers
    heads: Positive = 4  # a multiple of `kv_heads`
    kv_heads: Positive = 2  # heads of keys and values
    context: Positive = 512  # longest sequence in tokens
    words: tuple[Text, ...] = ()  # further words of its tokenizer, besides those of built-in environments


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ModelConfig:
    """The model that is trained and sampled.

    With a service, `path` is a checkpoint of a run at one, or the folder of the tokenizer; by default the tokenizer is
    the one that the service names. "openai:NAME" is a remote model, which can only play tasks.
    """

    # a model folder, a checkpoint, "owner/name[@revision]" of the hub, "smollm2-135m", "tiny"; `eval`: "openai:NAME"
    path: str = "tiny"
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # auto: cuda if there is one, else mps, else cpu
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"  # auto: bfloat16 on cuda, else float32
    lora: LoraConfig | None = None  # train low-rank adapters in place of all parameters
    # load a vision model whole: its vision tower as it is, or trained too; unset: "frozen" if the data have pictures
    vision: Literal["frozen", "train"] | None = None
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)  # the shape of path = "tiny"
    # keep only each layer's input for the backward pass: less memory, a quarter more time; auto: on cuda, if needed
    recompute: FlagOrAuto = "auto"
    # of a mixture of experts: how much the auxiliary loss that balances experts counts in every update; 0: not at all
    router_aux_loss: NonNegativeFloat = 0.0
    compile: Flag = False  # cuda: train layers through torch.compile, for models without fused kernels; 20 s once
    trust_remote_code: Flag = False  # run Python code in the model's folder
    chat_template: Text | None = None  # a Jinja file, or its text, in place of the tokenizer's; saved with checkpoints
    template_options: dict[str, Any] = field(default_factory=dict)  # for the template: { enable_thinking = false }
    # a `headrace serve` that trains and samples in place of this machine (docs/service-client.md)
    service: Text | None = None
    service_key_env: str = "TINKER_API_KEY"  # environment variable with the service's key; "": none is sent


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class RemoteConfig:
    """The OpenAI-compatible endpoint of path = "openai:NAME", for evaluation and demonstrations."""

    url: Text = "https://api.openai.com/v1"  # base URL, up to and including /v1
    api_key_env: str = "OPENAI_API_KEY"  # environment variable with the key; "": none is sent
    timeout_s: PositiveFloat = 120.0  # of one request
    deadline_s: PositiveFloat = 600.0  # of one reply, retries included
    at_once: Positive = 16  # requests that are open at the same time


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class LaunchConfig:
    """Inference servers that a run starts on this machine and stops at its end."""

    python: Text  # interpreter of an environment that has vLLM or SGLang
    replicas: Positive = 1  # how many servers
    gpus: tuple[Text, ...] = ()  # CUDA_VISIBLE_DEVICES of each server; unset: all see all
    args: tuple[str, ...] = ()  # further arguments of the servers
    env: dict[str, str] = field(default_factory=dict)  # further environment variables of the servers
    start_s: PositiveFloat = 900.0  # how long a server may take until it answers


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class EngineConfig:
    """The sampling engine: how many sequences it decodes together, and the size of its KV cache."""

    # continuous batching, the plain `generate` of transformers, or servers (docs/engines.md)
    type: Literal["embedded", "generate", "vllm", "sglang"] = "embedded"
    urls: tuple[Text, ...] = ()  # vllm, sglang: servers that run already, and serve this run only
    launch: LaunchConfig | None = None  # vllm, sglang: start servers here
    # where weights are written for servers and engine replicas; unset: the RAM disk /dev/shm
    sync_folder: Text | None = None
    # vllm, sglang: how servers get new weights: from a folder, by broadcast over gloo or NCCL, or by CUDA IPC
    sync: Literal["folder", "broadcast", "ipc"] = "folder"
    max_num_seqs: Positive = 32  # sequences that are decoded together
    kv_tokens: Positive | None = None  # positions in the KV cache; unset: twice `max_num_seqs` of the longest sequences
    prefill_chunk_tokens: Positive = 128  # long prompts are read in chunks of this size
    # cuda: decode in captured CUDA graphs, several tokens at a time; auto: in half precision, if the model is supported
    cuda_graphs: FlagOrAuto = "auto"

    @property
    def is_served(self) -> bool:
        """Tell whether inference servers sample, in processes of their own."""
        return self.type in ("vllm", "sglang")


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SourceConfig:
    """A source of tasks, conversations or preference pairs.

    Which keys count depends on `type`. "env": `name` of an environment, `size` tasks from `seed`, its `options`;
    "jsonl", "parquet", "dataset": `path` and `columns`; "hub": those, `subset` and `split`; "reasoning_gym": `name`,
    `size`, `seed`, `options`; "python": `path` and `options`, the arguments of the function; "task": `path`;
    "harbor": `path` and `options`.
    """

    # "env": an environment by name; "dataset": a folder of `datasets.save_to_disk`; "hub": a dataset of the hub
    type: Literal["env", "jsonl", "parquet", "hub", "dataset", "reasoning_gym", "python", "task", "harbor"]
    # hub: "owner/name[@revision]"; python: "file.py:function"; else the file or folder
    path: str | None = None
    subset: Text | None = None  # hub: which configuration of the dataset; unset: the only one
    split: Text | None = None  # hub: which split; unset: the only one
    name: str | None = None  # env, reasoning_gym: which environment or dataset
    size: Positive = 1000  # env, reasoning_gym: how many tasks are generated
    seed: Seed = 0  # env, reasoning_gym: seeds the tasks
    weight: PositiveFloat = 1.0  # share in a mixture, relative to the other sources
    # from our names (prompt, messages, answer, id; of pairs: prompt, chosen, rejected, margin) to the file's
    columns: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # passed to the environment or the reasoning-gym dataset
    system: str | None = None  # put before every conversation that has no system message
    env: str | None = None  # "file.py:Class": an environment of your own that plays these tasks (docs/environments.md)
    # rl.tasks: draw by weight p(1 - p), p the success rate of a task's last 16 episodes; unset: one after another
    curriculum: Literal["success_rate"] | None = None


def _as_tuple(value: Any) -> Any:
    """Make a list of one out of a single table."""
    return (value,) if isinstance(value, dict | SourceConfig) else value


TaskSources = Annotated[
    tuple[SourceConfig, ...], Field(description="a table, or a list of tables"), BeforeValidator(_as_tuple)
]


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ScheduleConfig:
    """The learning rate over training steps: linear warm-up, then constant, linear or cosine down to `final` x peak."""

    type: Literal["constant", "linear", "cosine"] = "constant"  # what follows the warm-up
    warmup_steps: NonNegative = 0  # training steps of linear warm-up
    final: Share = 0.0  # linear, cosine: the last learning rate as a share of the peak


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """AdamW, gradient clipping, and the learning rate over training steps."""

    learning_rate: PositiveFloat = 1e-5  # the peak of the schedule
    beta1: Share = 0.9  # AdamW: decay of the mean gradient
    beta2: Share = 0.95  # AdamW: decay of the mean squared gradient
    eps: PositiveFloat = 1e-8  # AdamW: added to the root of the mean square
    weight_decay: NonNegativeFloat = 0.0  # AdamW: decoupled, per unit of learning rate
    clip_norm: NonNegativeFloat = 1.0  # gradients are scaled down to this norm; 0: no clipping
    max_norm: NonNegativeFloat = 0.0  # above this the update is skipped; 0: only non-finite gradients are skipped
    max_skips: Positive = 5  # skipped updates in a row that end the run
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)  # learning rate over training steps


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SftConfig:
    """Supervised fine-tuning on conversations."""

    steps: Positive | None = None  # optimiser updates; this or `epochs`
    epochs: PositiveFloat | None = None  # passes over the data, all sources together; the steps follow from its rows
    batch_size: Positive = 32  # conversations of one update
    sources: tuple[SourceConfig, ...]  # conversations, mixed by their weights
    held_out: SourceConfig | None = None  # conversations whose loss is reported with every evaluation
    max_tokens: Positive = 1024  # longer conversations are cut, and counted
    micro_batch_tokens: Positive = 8192  # tokens computed at once; changes memory, not the gradient
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)  # AdamW and its schedule


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class DpoConfig:
    """Learning from preferences without a reward model, on the model that [sft] trained."""

    steps: Positive | None = None  # optimiser updates; this or `epochs`
    epochs: PositiveFloat | None = None  # passes over the data, all sources together; the steps follow from its rows
    batch_size: Positive = 32  # pairs (kto: labelled replies) of one update
    # pairs (columns prompt, chosen, rejected), for kto also labelled replies (prompt, completion, label)
    sources: tuple[SourceConfig, ...]
    held_out: SourceConfig | None = None  # pairs or replies whose accuracy and margin are reported
    loss: Literal["dpo", "ipo", "kto", "orpo", "simpo"] = "dpo"  # docs/preferences.md says which is which
    beta: PositiveFloat | None = None  # how much a log-ratio counts; unset: 0.1, of simpo 2.0
    label_smoothing: Share = 0.0  # dpo, simpo: share of pairs that are taken to be the wrong way round
    gamma: NonNegativeFloat = 0.5  # simpo: margin by which the chosen side is to be ahead
    desirable_weight: NonNegativeFloat = 1.0  # kto: weight of good replies
    undesirable_weight: NonNegativeFloat = 1.0  # kto: weight of bad replies
    # dpo, ipo, kto: folder of the reference model, or its URL; unset: the model the stage starts from
    reference: str | None = None
    max_tokens: Positive = 1024  # pairs with a longer side are left out, and counted
    micro_batch_tokens: Positive = 8192  # tokens computed at once; changes memory, not the gradient
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)  # AdamW and its schedule

    @property
    def has_reference(self) -> bool:
        """Tell whether the loss compares with a reference model."""
        return self.loss in ("dpo", "ipo", "kto")


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class RewardModelConfig:
    """A reward model: a scalar head on the model that [sft] trained, trained on preference pairs."""

    steps: Positive | None = None  # optimiser updates; this or `epochs`
    epochs: PositiveFloat | None = None  # passes over the data, all sources together; the steps follow from its rows
    batch_size: Positive = 32  # pairs of one update
    sources: tuple[SourceConfig, ...]  # pairs (columns prompt, chosen, rejected, margin), mixed by their weights
    held_out: SourceConfig | None = None  # pairs on which its accuracy is reported with every evaluation
    max_tokens: Positive = 1024  # pairs with a longer side are left out, and counted
    center_coef: NonNegativeFloat = 0.0  # pulls the two scores of a pair towards a sum of 0
    micro_batch_tokens: Positive = 8192  # tokens computed at once; changes memory, not the gradient
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)  # AdamW and its schedule


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class RewardTermConfig:
    """A term of the reward: a built-in reward or a user's function, with its weight."""

    # env, exact_match, math, final_number, choice, code, json_schema, regex, format, length, judge, reward_model,
    # reasoning_gym, valid_actions, "file.py:function", or http://HOST:PORT/NAME of a headrace serve --reference
    fn: str
    # reward_model: a saved one, or its URL; unset: the one of [reward_model]; judge: a model sampled in this process
    path: str | None = None
    weight: Real = 1.0  # factor in the total
    name: str | None = None  # of its metric; unset: that of the function
    kwargs: dict[str, Any] = field(default_factory=dict)  # options of a built-in one, arguments of a user's function
    # what the indices of step outputs count (docs/authoring-rewards.md)
    step_index: Literal["auto", "message", "turn"] = "auto"
    default_step_reward: Real = 0.0  # reward of steps that the step outputs do not name, also if there are none
    terminal_score: Literal["auto", "add"] = "auto"  # add: the score counts on the last step beside step outputs
    score_range: tuple[Real, Real] | None = None  # scores outside are invalid
    # accept scores with is_score_valid = False, with which some functions mark wrong answers
    keep_invalid: Flag = False


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class RewardRunnerConfig:
    """Runner of users' reward functions: in sandboxed processes, or, if they are trusted, in this process."""

    type: Literal["process", "inprocess"] = "process"  # sandboxed processes (docs/sandbox.md), or this process
    strict: Flag = False  # refuse to run where files, network or processes cannot be isolated
    workers: Positive | None = None  # processes for each function; unset: one for each CPU core, at most 8
    fork: Literal["episode", "group"] = "episode"  # a process for each episode, or, faster, for each group
    wall_s: PositiveFloat = 10.0  # most time of one call
    cpu_s: Positive = 10  # most CPU time of each process of a call
    memory_mb: Positive = 1024  # most memory of a call
    processes: Positive = 16  # most processes and threads of a call
    import_s: PositiveFloat = 60.0  # most time to start a worker and import the file
    readable: tuple[str, ...] = ()  # files and folders that functions may read, besides code
    max_invalid_share: Share = 0.1  # the run ends when more of the last 200 evaluations are invalid


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class FilterConfig:
    """A filter of groups; groups that it rejects are replaced by new ones."""

    # "reward_spread", "reward_range", "diversity", "length", "success_rate", or "file.py:function"
    fn: str
    options: dict[str, Any] = field(default_factory=dict)  # keyword arguments of the filter


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class AsyncConfig:
    """Asynchronous training, [rl.async] in a file: how far sampling runs ahead, and how stale tokens are handled.

    `behaviour_weight`, `weight_cap`, `weight_floor` and `cap_action` set the weights of stale tokens.
    """

    max_staleness: Staleness = 0  # eta: how many versions old a trained token may be
    max_running: Positive | None = None  # groups in flight; unset: as many as the staleness bound admits
    # drop a group that has an older token, or train only its tokens that are young enough
    stale_action: Literal["drop", "mask"] = "drop"
    # ratio to the policy at the start of the step, to the next version (recorded or guessed), or 1; unset: `correction`
    behaviour_weight: Literal["full", "one_step", "loglinear", "none"] | None = None
    weight_cap: PositiveFloat = 5.0  # largest behaviour weight
    weight_floor: NonNegativeFloat = 0.0  # smallest behaviour weight
    cap_action: Literal["mask", "clamp"] = "mask"  # outside of the bounds: leave the token out, or clamp its weight
    # at new weights: resume sequences with recomputed (abort) or kept (inflight) keys and values, or let them end first
    interrupt: Literal["abort", "inflight", "drain"] = "abort"
    drain_s: PositiveFloat = 60.0  # interrupt "drain": how long sequences may take to end before they are stopped
    oversampling: Factor = 1.0  # groups started for each that is trained
    # which groups are trained when more are ready than a batch needs: the first to finish, or those of highest score
    select: Literal["first", "best"] = "first"
    # select "best": "reward_spread", "mean_reward", or "file.py:function" of a group
    select_score: str = "reward_spread"
    # "file.py:function", called with the counts of groups: how many more may start; the smallest number counts
    limits: tuple[Text, ...] = ()
    replay_groups: NonNegative = 0  # groups of earlier batches, no older than `max_staleness`, added to every batch
    slow_wait_s: PositiveFloat = 60.0  # how long new weights wait for a task that was dropped as stale twice
    task_timeout_s: PositiveFloat = 600.0  # an episode that takes longer fails
    max_consecutive_drops: Positive = 64  # the run ends after so many groups dropped in a row
    # above 0: a virtual clock; all sequences advance by that many tokens, then wait for each other
    lockstep_tokens: NonNegative = 0


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SamplingConfig:
    """Sampling of turns."""

    temperature: Temperature = 1.0  # of sampling, and so of the distribution that is trained
    top_p: Nucleus = 1.0  # needs `rl.allow_truncated_sampling` when below 1
    top_k: Positive | None = None  # needs `rl.allow_truncated_sampling`
    min_p: Share = 0.0  # needs `rl.allow_truncated_sampling` when above 0
    stop_strings: tuple[Text, ...] = ()  # a turn ends when one of them appears
    max_tokens: Positive = 64  # most tokens of one turn


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class CorrectionConfig:
    """Weights of stale tokens, for the whole step: exp(target - sampler), bounded to [floor, cap]."""

    # "full": to the policy at the start of the step; "loglinear": to the next version, guessed; "none": 1
    behaviour: Literal["full", "loglinear", "none"] = "full"
    bound: Literal["mask", "clamp"] = "mask"  # outside of the bounds: leave the token out, or clamp its weight
    level: Literal["token", "sequence", "geometric"] = "token"  # what has one weight: a token, or a whole sequence
    floor: NonNegativeFloat = 0.0  # smallest weight
    cap: PositiveFloat = 5.0  # largest weight
    normalise: Flag = False  # scale the weights of a step to mean 1
    m2_threshold: PositiveFloat = 0.04  # loss m2po: largest mean of squared log-ratios


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class CriticConfig:
    """The value model of PPO with GAE: a scalar head on a trunk of its own or on the policy's."""

    # "own": a second model, trained beside the policy; "shared": a head on the policy's trunk, trained in one loss
    trunk: Literal["own", "shared"] = "own"
    # trunk "own": folder it starts from, or "reward_model" for that of this run; unset: the model the stage starts from
    path: str | None = None
    gamma: Share = 1.0  # discount per step
    lam: Share = 0.95  # GAE: 0 trusts the critic alone, 1 the rewards alone
    value_coef: NonNegativeFloat = 0.5  # factor of the value loss
    value_clip: NonNegativeFloat = 0.2  # how far a value may move in one training step; 0: no limit
    # add the value after the last step to episodes that a limit cut off (docs/objectives.md says when to write false)
    bootstrap: Flag = True
    whiten: Flag = True  # bring the advantages of a training step to mean 0 and standard deviation 1
    kl_coef: NonNegativeFloat = 0.0  # factor of the KL to the reference model, subtracted from every token's reward
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"  # of that KL; k1 is the one whose policy gradient is the KL's
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)  # trunk "own": AdamW and its schedule


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class SaveConfig:
    """The choice of episodes that are written to rollouts/step_NNNNNN.jsonl."""

    every: NonNegative = 1  # save every n-th training step, and the first; 0: none
    # "all", "failures", "top_advantage" (largest absolute values), or "file.py:function" of a credited episode
    which: str = "all"
    every_episode: Positive = 1  # save every n-th of those that `which` chooses
    top: Positive = 16  # which "top_advantage": how many of a training step
    whole_groups: Flag = False  # save the whole group of a chosen episode, which recomputing advantages needs
    lean: Flag = False  # leave token arrays out: smaller files, for viewing and for rewards that take no tokens


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class RlConfig:
    """Reinforcement learning: a training step takes `groups` groups of `group_size` episodes and makes `minibatches`
    optimiser updates."""

    steps: Positive | None = None  # training steps; this or `epochs`
    epochs: PositiveFloat | None = None  # passes over the data, all sources together; the steps follow from its rows
    groups: Positive = 8  # tasks of one training step; a multiple of `minibatches`
    group_size: Positive = 8  # episodes of one task
    minibatches: Positive = 1  # optimiser updates of one training step
    tasks: TaskSources  # what episodes start from; several sources are mixed by their weights
    rewards: tuple[RewardTermConfig, ...] = (
        RewardTermConfig(fn="env"),
    )  # summed with their weights; unset: what the environment gives
    # functions, what the environment gives (functions are then only measured), or their sum; unset: `rewards` as listed
    reward_source: Literal["function", "env", "sum"] | None = None
    reward_runner: RewardRunnerConfig = field(default_factory=RewardRunnerConfig)  # where users' reward functions run
    # reward of episodes that a limit cut off: as earned, 0, left out of statistics and loss, less `truncated_penalty`
    truncated_reward: Literal["keep", "zero", "exclude", "penalty"] = "keep"
    truncated_penalty: NonNegativeFloat = 0.0  # truncated_reward "penalty": subtracted from the last step's reward
    generate_fn: str | None = None  # "file.py:function": a user's rollout in place of ours
    program: str | None = None  # "file.py:function": an agent that calls the model itself (docs/agents.md)
    max_turns: Positive = 16  # assistant turns of one episode
    end_tool: Text | None = None  # a call of this tool ends an episode; the tool is offered if the environment does not
    end_pattern: Text | None = None  # a regular expression: an episode ends with a turn that matches it
    env_threads: Positive = 64  # threads for environments that block (slow tools)
    max_prompt_tokens: Positive = 512  # tasks with longer prompts are left out, and counted
    max_episode_tokens: Positive = 1024  # most tokens of the prompt and all turns together
    sampling: SamplingConfig = field(default_factory=SamplingConfig)  # how turns are sampled
    allow_truncated_sampling: Flag = False  # permit top_p, top_k and min_p, which bias the loss
    # a short name for a credit method, a loss, a weighting and more (docs/objectives.md); keys that the file sets win
    algorithm: (
        Literal[
            "grpo",
            "dapo",
            "dr_grpo",
            "rloo",
            "reinforce_pp",
            "gspo",
            "cispo",
            "gigpo",
            "ppo",
            "segment_wise_ppo",
            "drgrpo",
            "enhanced_ppo",
            "conservative_ppo",
        ]
        | None
    ) = None
    # grpo, dr_grpo, rloo, gigpo and more (docs/objectives.md); token_gae, turn_gae: with a critic; "file.py:function"
    credit: str = "grpo"
    credit_params: dict[str, Real | str] = field(default_factory=dict)  # of the credit method, such as gamma and norm
    # what identifies a state: "state" (the environment's key), "observation", "auto" (either), or "file.py:function"
    anchor: str = "auto"
    sequence_unit: Literal["episode", "step"] = "episode"  # what a training sequence is: an episode, or each turn
    loss: str = "ppo"  # a name of docs/objectives.md, "file.py:function", or a sum: "ppo + entropy_bonus"
    loss_params: dict[str, Real] = field(default_factory=dict)  # numbers of the loss, such as clip_low
    # TRL's loss_type: token_mean, token_sum, sequence_mean, seq_mean_token_sum, prompt_mean, constant
    weighting: str = "token_mean"
    # of a mixture of experts: train tokens with the experts that sampled them, or with those the router chooses now
    routing: Literal["replay", "free"] = "replay"
    weighting_constant: PositiveFloat | None = None  # weighting "constant" divides by it; unset: max_episode_tokens
    kl_limit: PositiveFloat | None = None  # largest mean KL per token to the policy at the start of the step
    # beyond `kl_limit`: drop the step's other minibatches, or scale the update back to the limit
    kl_action: Literal["discard", "scale_back"] = "discard"
    correction: CorrectionConfig | None = None  # weights of stale tokens; unset: only if the loss needs them
    # folder of the model of reference_logprobs, or its URL; unset: the model the stage starts from
    reference: str | None = None
    teacher: str | None = None  # folder of the model of teacher_logprobs, or its URL
    critic: CriticConfig | None = None  # PPO with GAE: the value model of credit "token_gae" and "turn_gae"
    filters: tuple[FilterConfig, ...] = ()  # reject groups, which are then replaced by new ones
    save: SaveConfig = field(default_factory=SaveConfig)  # which episodes are saved in the run folder (docs/viewing.md)
    sync_every: Positive = 1  # training steps between two publications of weights
    micro_batch_tokens: Positive = 8192  # tokens computed at once; changes memory, not the gradient
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)  # AdamW and its schedule
    asynchronous: AsyncConfig = field(default_factory=AsyncConfig)  # how far sampling may run ahead of training


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class TeacherConfig:
    """A teacher and the tasks on which the student follows it."""

    path: Text  # folder of a model with the student's vocabulary
    tasks: SourceConfig  # what episodes start from; its weight is its share among the teachers


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class DistillConfig:
    """On-policy distillation: the student plays, and learns what a teacher would have written at every token."""

    steps: Positive | None = None  # optimiser updates; this or `epochs`
    epochs: PositiveFloat | None = None  # passes over the data, all sources together; the steps follow from its rows
    batch_size: Positive = 64  # episodes of one update
    teachers: tuple[TeacherConfig, ...]  # each with its tasks
    # reverse: KL(student, teacher), which keeps to what the teacher finds likely; forward: KL(teacher, student)
    kl: Literal["reverse", "forward"] = "reverse"
    top_k: Positive = 64  # likeliest tokens of the teacher that are compared one by one; the rest is compared as one
    max_turns: Positive = 16  # assistant turns of one episode
    max_prompt_tokens: Positive = 512  # tasks with longer prompts are left out, and counted
    max_episode_tokens: Positive = 1024  # most tokens of the prompt and all turns together
    sampling: SamplingConfig = field(default_factory=SamplingConfig)  # how the student's turns are sampled
    micro_batch_tokens: Positive = 8192  # tokens computed at once; changes memory, not the gradient
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)  # AdamW and its schedule


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class EvalConfig:
    """Held-out evaluation: `samples` episodes for each of `tasks` tasks with fixed seeds; pass@1 and pass@samples."""

    every: NonNegative = 0  # training steps between evaluations; 0: only at the end of a stage
    source: SourceConfig | None = None  # held-out tasks; unset: no evaluation
    tasks: Positive = 64  # how many held-out tasks
    samples: Positive = 1  # episodes of each task
    temperature: Temperature = 1.0  # of sampling
    seed: Seed = 12345  # the same at every evaluation


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """Schedule and retention of checkpoints."""

    every: NonNegative = 0  # training steps between checkpoints; 0: only at the end of a stage
    keep_last: Positive = 2  # newest checkpoints that are kept
    # training steps between checkpoints that are kept for good; 0: only the last and the best are kept
    keep_every: NonNegative = 0
    deadline_s: PositiveFloat = 120.0  # for the checkpoint that SIGTERM asks for


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class WandbConfig:
    """Weights & Biases."""

    project: Text = "headrace"  # where Weights & Biases lists the run
    entity: str = ""  # user or team; empty: the account's own
    mode: Literal["online", "offline"] = "online"  # offline: a folder that  wandb sync  sends later


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class TrackioConfig:
    """Trackio, on this machine or in a Hugging Face Space."""

    project: Text = "headrace"  # where Trackio lists the run
    space_id: str = ""  # "owner/name" of a Space; empty: on this machine, for  trackio show


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class MlflowConfig:
    """An MLflow tracking server or store."""

    experiment: Text = "headrace"  # where MLflow lists the run
    tracking_uri: str = ""  # of a server or store; empty: MLFLOW_TRACKING_URI, or MLflow's own default


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class PrometheusConfig:
    """A scrape endpoint: GET /metrics without a key, so by default it listens on this machine alone."""

    host: Text = "127.0.0.1"  # address that is listened on
    port: Port = 9464  # 0: any free port, which is logged


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class DatadogConfig:
    """A Datadog agent that takes DogStatsD datagrams."""

    host: Text = "127.0.0.1"  # of the agent that receives DogStatsD datagrams
    port: Port = 8125  # of the agent
    prefix: Text = "headrace"  # of every metric name
    tags: tuple[Text, ...] = ()  # added to stage and run, such as "team:agents"


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class AlertConfig:
    """An alert when a metric is beyond a threshold: a line in the log, and a message to `webhook`."""

    metric: Text  # its name in docs/metrics.md
    above: Real | None = None  # the metric is beyond when it is larger
    below: Real | None = None  # the metric is beyond when it is smaller
    for_steps: Positive = 1  # records in a row that must be beyond
    cooldown_steps: NonNegative = 100  # records after an alert in which it is not repeated
    webhook: Text | None = None  # a URL that receives JSON by POST, or "env:NAME", the environment variable with it


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class MetricsConfig:
    """Metric sinks besides metrics.jsonl, and alerts. They do not change what is trained."""

    # a sink that is listed must work: its package is checked before training starts
    sinks: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow", "prometheus", "datadog"], ...] = ()
    wandb: WandbConfig = field(default_factory=WandbConfig)  # sink "wandb"
    trackio: TrackioConfig = field(default_factory=TrackioConfig)  # sink "trackio"
    mlflow: MlflowConfig = field(default_factory=MlflowConfig)  # sink "mlflow"
    prometheus: PrometheusConfig = field(default_factory=PrometheusConfig)  # sink "prometheus"
    datadog: DatadogConfig = field(default_factory=DatadogConfig)  # sink "datadog"
    alerts: tuple[AlertConfig, ...] = ()  # thresholds


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class ClusterConfig:
    """Processes besides the one of the run. They change nothing that is trained, but the order of sums over ranks."""

    ranks: Positive = 1  # processes that the model is sharded over, each with a GPU of its own on cuda
    engine_replicas: NonNegative = 0  # embedded engines in processes, or servers that Ray places; 0: the run's own
    colocate: Flag = False  # trainer and inference servers use the same GPUs in turns (docs/engines.md)
    # of Ray: "local" starts one on this machine for this run, "auto" finds the one that runs here; empty: no cluster
    address: str = ""
    rollout_workers: NonNegative | None = None  # that play groups; unset: 2 if there is an address; 0: the run plays
    reward_workers: NonNegative = 0  # that score groups; 0: the run scores
    reference_workers: NonNegative = 0  # that score with the reference and the teacher; 0: the run does
    deadline_s: PositiveFloat = 600.0  # of every wait for a process: its place, its start, a sign of progress


@dataclass(frozen=True, slots=True, kw_only=True, config=STRICT)
class Config:
    """The configuration of a run."""

    run: RunConfig = field(default_factory=RunConfig)  # name, folder and seed
    model: ModelConfig = field(default_factory=ModelConfig)  # the model that is trained
    remote: RemoteConfig = field(default_factory=RemoteConfig)  # the endpoint of path = "openai:NAME"
    engine: EngineConfig = field(default_factory=EngineConfig)  # the sampling engine
    sft: SftConfig | None = None  # supervised fine-tuning; the first stage, if given
    distill: DistillConfig | None = None  # on-policy distillation; starts from the checkpoint of [sft], if given
    dpo: DpoConfig | None = None  # DPO and its kin on preferences; starts where the stages before it ended
    # learned from preference pairs; starts where the stages before it ended
    reward_model: RewardModelConfig | None = None
    rl: RlConfig | None = None  # reinforcement learning; starts where the stages before it that train the policy ended
    eval: EvalConfig = field(default_factory=EvalConfig)  # held-out evaluation of the stages
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)  # when they are written and which are kept
    metrics: MetricsConfig = field(default_factory=MetricsConfig)  # sinks besides metrics.jsonl, and alerts
    cluster: ClusterConfig = field(default_factory=ClusterConfig)  # processes besides the one of the run


Stage = SftConfig | DistillConfig | DpoConfig | RewardModelConfig | RlConfig


def stages_of(config: Config) -> dict[str, Stage]:
    """Return the stages that a configuration has, by name, in their order."""
    stages: dict[str, Stage | None] = {
        "sft": config.sft,
        "distill": config.distill,
        "dpo": config.dpo,
        "reward_model": config.reward_model,
        "rl": config.rl,
    }
    return {name: stage for name, stage in stages.items() if stage is not None}


def num_steps(stage: Stage) -> int:
    """Return the steps of a stage whose epochs, if it had any, have been turned into steps."""
    assert stage.steps is not None, "the epochs of this stage have not been turned into steps"
    return stage.steps
