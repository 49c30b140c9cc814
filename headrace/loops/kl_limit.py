"""KL limit per training step, as in conservative PPO.

If an update moves the policy past the limit, either scale that update back or skip the step's remaining minibatches.
"""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headrace.algo.kl_control import MAX_TRIES, SAFETY, adapt_kl_coef, kl_scale, mean_kl
from headrace.loops.step_batch import Score
from headrace.metrics import Max, Mean, Metric, Min, Sum
from headrace.protocols import TrainBackend
from headrace.types import Datum, LossSpec, ScaleUpdate

logger = logging.getLogger(__name__)
COEF = "sampler_kl_coef"
MAX_DOUBLINGS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KlLimitResult:
    """The outcome of measuring one update."""

    stop: bool  # skip the step's remaining minibatches
    metrics: dict[str, Metric]


@dataclass(slots=True, kw_only=True)
class KlLimit:
    """Measures each update's KL against the limit, and adapts the coefficient of the loss term `sampler_kl`.

    The coefficient is doubled after a step whose KL is above 1.5 x half of the limit and halved below half / 1.5, at
    most ten times either way.
    """

    limit: float  # of the mean KL(proximal || policy) per trained token
    policy: Score  # log-probs of the policy as it is now
    backend: TrainBackend | None = None  # scales updates back, which must be reversible; None: skip minibatches instead
    coef: float | None = None  # the initial coefficient; None: the loss has no such term
    doublings: float = 0.0  # of the coefficient; all the state that a checkpoint needs
    _kl: float = field(default=0.0, init=False)  # of the step so far

    def loss(self, spec: LossSpec) -> LossSpec:
        """Return the loss with the current coefficient."""
        return spec if self.coef is None else replace(spec, params={**spec.params, COEF: self._current_coef()})

    async def after_update(self, step: int, data: Sequence[Datum], *, left: int) -> KlLimitResult:
        """Measure the KL on the data of the update just made; `left` minibatches of the step are still to come."""
        kl = self._kl = mean_kl(data, await self.policy(data))
        exceeded = not kl <= self.limit  # a KL that is not a number is beyond any limit
        metrics: dict[str, Metric] = {"train/step_kl": Max(kl), "train/kl_limit_exceeded": Sum(int(exceeded))}
        if self.backend is not None:
            share, scaled_kl = await self._scale_back(self.backend, step, data, kl) if exceeded else (1.0, kl)
            return KlLimitResult(
                stop=False, metrics={**metrics, "train/kept_share": Min(share), "train/kept_kl": Max(scaled_kl)}
            )
        if exceeded:
            logger.warning(
                "step %d moved the policy by a KL of %.3g, beyond rl.kl_limit = %g; %d minibatches are discarded",
                step + 1,
                kl,
                self.limit,
                left,
                extra={"repeats": "rl.kl_limit"},
            )
        return KlLimitResult(
            stop=exceeded, metrics={**metrics, "train/discarded_minibatches": Sum(left if exceeded else 0)}
        )

    async def _scale_back(
        self, backend: TrainBackend, step: int, data: Sequence[Datum], kl: float
    ) -> tuple[float, float]:
        """Scale the update back until it meets the limit; returns the share that is kept, and its KL.

        The share is chosen by a guess of its KL, so the KL of each is measured; after four tries beyond the limit the
        whole update is undone.
        """
        share, now = 1.0, kl
        for _ in range(MAX_TRIES):
            part = kl_scale(now, limit=SAFETY * self.limit)
            share *= part
            await asyncio.wrap_future(backend.optim_step(ScaleUpdate(share=part)))
            now = mean_kl(data, await self.policy(data))
            if now <= self.limit or not share:
                break
        else:
            share = 0.0
            await asyncio.wrap_future(backend.optim_step(ScaleUpdate(share=0.0)))
            now = mean_kl(data, await self.policy(data))
        logger.warning(
            "step %d moved the policy by a KL of %.3g, beyond rl.kl_limit = %g; "
            "%.3g of the update is kept, a KL of %.3g",
            step + 1,
            kl,
            self.limit,
            share,
            now,
            extra={"repeats": "rl.kl_limit"},
        )
        return share, now

    def end_step(self) -> dict[str, Metric]:
        """Adapt the coefficient for the next step; returns as a metric the one that this step had."""
        if self.coef is None:
            return {}
        before = self._current_coef()
        kl = self._kl if math.isfinite(self._kl) else math.inf
        doublings = self.doublings + math.log2(adapt_kl_coef(1.0, kl=kl, target=self.limit / 2))
        self.doublings = min(max(doublings, -MAX_DOUBLINGS), MAX_DOUBLINGS)
        return {"train/sampler_kl_coef": Mean(before, 1)}

    def _current_coef(self) -> float:
        assert self.coef is not None
        return self.coef * math.exp2(self.doublings)
