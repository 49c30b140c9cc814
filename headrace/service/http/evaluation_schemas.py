"""Pydantic models of evaluation requests and answers. Unknown fields are refused: these routes are our own."""

import math
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_SEQUENCES = 4096
Token = Annotated[int, Field(ge=0, lt=2**31)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EvaluationPrompt(Strict):
    """`data` is for the reward function: an answer, tests, whatever it reads."""

    tokens: list[Token] = Field(min_length=1)
    data: dict[str, Any] = {}


class Given(Strict):
    """A whole sequence. `weights`: one per token, that of the first is not looked at; without: every token counts."""

    tokens: list[Token] = Field(min_length=2)
    weights: list[Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None = None

    @model_validator(mode="after")
    def _aligned(self) -> "Given":
        if self.weights is not None and len(self.weights) != len(self.tokens):
            raise ValueError(f"weights has {len(self.weights)} numbers for {len(self.tokens)} tokens")
        return self


class Evaluate(Strict):
    """`policy`: other weights than the run's own: base, a tinker:// path, a sampling session, another run."""

    policy: str | None = None
    prompts: list[EvaluationPrompt] = Field(default=[], max_length=MAX_SEQUENCES)
    sequences: list[Given] = Field(default=[], max_length=MAX_SEQUENCES)
    num_samples: int = Field(default=1, ge=1, le=256)
    max_tokens: int = Field(default=64, ge=1, le=2**20)
    temperature: float = Field(default=1.0, ge=0.01, le=100.0)
    seed: int = Field(default=0, ge=0, lt=2**62)
    reference: str | None = "base"
    reward: str | None = None
    return_completions: bool = False

    @model_validator(mode="after")
    def _bounded(self) -> "Evaluate":
        if not self.prompts and not self.sequences:
            raise ValueError("there is nothing to evaluate on: give prompts or sequences")
        if len(self.prompts) * self.num_samples > MAX_SEQUENCES:
            raise ValueError(f"prompts times num_samples must be at most {MAX_SEQUENCES}")
        return self


class Compare(Evaluate):
    """`other`: what the policy is compared with, named as `policy` is."""

    other: str


class Estimate(Strict):
    """A mean over `count` pairs, or a share of them, with its 95 % interval (null: too few to tell)."""

    value: float
    low: float | None
    high: float | None
    count: int


class Evaluation(Strict):
    """`metrics` that are not known are left out. `methods`: how KL and entropy were found: exact (whole distributions),
    k3 or sampled (estimates). `rewards`: of each prompt's completions; null where a function could not tell."""

    metrics: dict[str, float]
    methods: dict[str, str]
    reference: str | None
    rewards: list[list[float | None]] | None = None
    completions: list[list[list[int]]] | None = None


class Comparison(Strict):
    """`paired`: differences (this minus other) of nll, length and reward, and the win rate under the reward."""

    this: Evaluation
    other: Evaluation
    metrics: dict[str, float]
    methods: dict[str, str]
    paired: dict[str, Estimate]


class RewardEstimate(Strict):
    """Rewards by prompt."""

    rewards: list[list[float | None]]

    @classmethod
    def of(cls, judged: Sequence[Sequence[float | None]]) -> "RewardEstimate":
        return cls(rewards=[list(group) for group in judged])

    def metrics(self) -> dict[str, float]:
        """Return means and counts; the standard error is over prompts, because samples of one prompt are alike."""
        successful = [[reward for reward in group if reward is not None] for group in self.rewards]
        means = [mean(group) for group in successful if group]
        failed = sum(len(group) for group in self.rewards) - sum(map(len, successful))
        return {
            "reward_mean": mean(means) if means else math.nan,
            "reward_se": stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan,
            "rewards_failed": float(failed),
        }
