"""Conservative PPO: an update that took the policy further than a limit is scaled back, or the last one of its step."""

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headrace.algo.kl_control import adapt_kl_coef, kl_scale
from headrace.algo.statistics import k3
from headrace.loops.step_batch import Score
from headrace.metrics import Max, Mean, Metric, Min, Sum
from headrace.protocols import TrainBackend
from headrace.types import Datum, FloatArray, LossSpec, ScaleUpdate

logger = logging.getLogger(__name__)
COEF = "sampler_kl_coef"
MOST_DOUBLINGS = 10.0
MOST_TRIES = 4  # of a share that is not 0
SAFETY = 0.95  # of the limit is aimed at: a KL that grows a little faster than its square still meets it


@dataclass(frozen=True, slots=True, kw_only=True)
class KlLimitResult:
    """What an update did: `stop` says that no further minibatch of the step is to be used."""

    stop: bool
    metrics: dict[str, Metric]


@dataclass(slots=True, kw_only=True)
class KlLimit:
    """`limit` is of the mean KL(proximal || policy) per trained token; `policy` scores the policy as it is now.

    Where the loss has the term `sampler_kl`, its coefficient is doubled after a step that moved more than 1.5 x half of
    the limit and halved below half / 1.5, at most ten times either way. `doublings` is the whole state.
    """

    limit: float
    policy: Score
    backend: TrainBackend | None = None  # scales updates back, which must be reversible; None: the rest is discarded
    coef: float | None = None  # the first coefficient; None: the loss has no such term
    doublings: float = 0.0
    _kl: float = field(default=0.0, init=False)  # of the step so far

    def loss(self, spec: LossSpec) -> LossSpec:
        """The loss with its present coefficient."""
        return spec if self.coef is None else replace(spec, params={**spec.params, COEF: self._present()})

    async def after_update(self, step: int, data: Sequence[Datum], *, left: int) -> KlLimitResult:
        """Measure on the data of the update just made; `left` minibatches of the step are still to come."""
        kl = self._kl = mean_kl(data, await self.policy(data))
        exceeded = not kl <= self.limit  # a KL that is not a number is beyond any limit
        metrics: dict[str, Metric] = {"train/step_kl": Max(kl), "train/kl_limit_exceeded": Sum(int(exceeded))}
        if self.backend is not None:
            share, kept = await self._scale_back(self.backend, step, data, kl) if exceeded else (1.0, kl)
            return KlLimitResult(
                stop=False, metrics={**metrics, "train/kept_share": Min(share), "train/kept_kl": Max(kept)}
            )
        if exceeded:
            logger.warning(
                "step %d moved the policy by a KL of %.3g, beyond rl.kl_limit = %g; %d minibatches are discarded",
                step + 1,
                kl,
                self.limit,
                left,
            )
        return KlLimitResult(
            stop=exceeded, metrics={**metrics, "train/discarded_minibatches": Sum(left if exceeded else 0)}
        )

    async def _scale_back(
        self, backend: TrainBackend, step: int, data: Sequence[Datum], kl: float
    ) -> tuple[float, float]:
        """Take back as much of the update as the limit asks for; returns the share that is kept and its KL.

        The KL of a share is a guess, so each is measured; what is still beyond after four is taken back whole.
        """
        share, now = 1.0, kl
        for _ in range(MOST_TRIES):
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
        )
        return share, now

    def end_step(self) -> dict[str, Metric]:
        """Adapt the coefficient for the next step; says which one this step had."""
        if self.coef is None:
            return {}
        before = self._present()
        kl = self._kl if math.isfinite(self._kl) else math.inf
        moved = self.doublings + math.log2(adapt_kl_coef(1.0, kl=kl, target=self.limit / 2))
        self.doublings = min(max(moved, -MOST_DOUBLINGS), MOST_DOUBLINGS)
        return {"train/sampler_kl_coef": Mean(before, 1)}

    def _present(self) -> float:
        assert self.coef is not None
        return self.coef * math.exp2(self.doublings)


def mean_kl(data: Sequence[Datum], policy_logprobs: Sequence[FloatArray]) -> float:
    """Mean of k3 between `proximal_logprobs` and the policy's over the trained tokens; 0 if there are none."""
    total, count = 0.0, 0
    for datum, policy in zip(data, policy_logprobs, strict=True):
        trained = datum.arrays["weights"] != 0
        total += float(k3(datum.arrays["proximal_logprobs"][trained], policy[trained]).sum())
        count += int(trained.sum())
    return total / max(count, 1)
