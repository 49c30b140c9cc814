"""Loss functions by the name a configuration gives them. `docs/objectives.md` says which to use when.

- `supervised`: cross-entropy and distillation.
- `surrogate`: importance sampling and PPO; `sequence` has one ratio per sequence (GSPO).
- `score_function`: CISPO, AIPO and other score-function forms with a bounded ratio.
- `soft_clip`: SAPO and DRO, which keep the policy near the sampler without a hard clip.
- `decoupled`: losses for tokens of several policy versions, which read what `algo.correction` writes.
- `preference`, `discriminative`: losses of pairs and of groups.
- `value`: losses of a value head.
- `regularisers`: KL and entropy terms to add to a policy loss; `compose` adds losses.
- `ratios`: ratios of two policies, and the metrics that losses share.
- `forward_metrics`: figures of a forward pass besides those of its loss.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from headrace import names
from headrace.algo.loss_signature import LossFn
from headrace.algo.losses.compose import sum_losses
from headrace.algo.losses.decoupled import decoupled_ppo, loglinear_ppo, m2po
from headrace.algo.losses.discriminative import discriminative, discriminative_term
from headrace.algo.losses.preference import bradley_terry, dpo, ipo, kto, orpo, simpo
from headrace.algo.losses.regularisers import (
    entropy_bonus,
    reference_kl_k1_k2,
    reference_kl_k2,
    reference_kl_k3,
    reference_kl_k3_k2,
    reference_kl_weighted,
    sampler_kl,
)
from headrace.algo.losses.score_function import aipo, cispo, geometric_mis, icepop, mis, sequence_mis, sequence_tis
from headrace.algo.losses.sequence import gspo, gspo_token, sequence_ppo
from headrace.algo.losses.soft_clip import dro, sapo
from headrace.algo.losses.supervised import cross_entropy, distillation, teacher_kl_forward, teacher_kl_reverse
from headrace.algo.losses.surrogate import importance_sampling, ppo
from headrace.algo.losses.value import shared_value, value, value_clipped
from headrace.algo.name_lookup import lookup

LOSSES: Mapping[str, LossFn] = {
    "cross_entropy": cross_entropy,
    "distillation": distillation,
    "teacher_kl_reverse": teacher_kl_reverse,
    "teacher_kl_forward": teacher_kl_forward,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "conservative_ppo": sum_losses((ppo, sampler_kl)),
    "decoupled_ppo": decoupled_ppo,
    "loglinear_ppo": loglinear_ppo,
    "m2po": m2po,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "sequence_ppo": sequence_ppo,
    "cispo": cispo,
    "aipo": aipo,
    "tis": aipo,
    "mis": mis,
    "icepop": icepop,
    "sequence_tis": sequence_tis,
    "sequence_mis": sequence_mis,
    "geometric_mis": geometric_mis,
    "sapo": sapo,
    "dro": dro,
    "discriminative": discriminative,
    "discriminative_term": discriminative_term,
    "dpo": dpo,
    "ipo": ipo,
    "kto": kto,
    "orpo": orpo,
    "simpo": simpo,
    "bradley_terry": bradley_terry,
    "value": value,
    "value_clipped": value_clipped,
    "shared_value": shared_value,
    "reference_kl_k1_k2": reference_kl_k1_k2,
    "reference_kl_k2": reference_kl_k2,
    "reference_kl_k3": reference_kl_k3,
    "reference_kl_k3_k2": reference_kl_k3_k2,
    "reference_kl_weighted": reference_kl_weighted,
    "sampler_kl": sampler_kl,
    "entropy_bonus": entropy_bonus,
}
assert tuple(LOSSES) == names.LOSSES


def find_loss(fn: str | Callable[..., Any]) -> LossFn:
    """Find a loss by its name or a sum of names ("ppo + entropy_bonus"); a function is returned as it is.

    Raises ConfigError that names the nearest loss if there is none of a name.
    """
    if not isinstance(fn, str):
        return fn
    return _named_loss(fn)


@lru_cache(maxsize=256)  # a sum is a function of its own, and what is read of its signature is kept for it
def _named_loss(terms: str) -> LossFn:
    return sum_losses([lookup(LOSSES, name.strip(), "loss") for name in terms.split("+")])
