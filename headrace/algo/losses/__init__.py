"""The losses there are, by the name a configuration gives them. `docs/objectives.md` says which to use when."""

from collections.abc import Callable, Mapping
from typing import Any

from headrace import names
from headrace.algo.loss_signature import LossFn
from headrace.algo.losses.compose import sum_losses
from headrace.algo.losses.decoupled import decoupled_ppo, loglinear_ppo, m2po
from headrace.algo.losses.discriminative import discriminative
from headrace.algo.losses.preference import bradley_terry, dpo, ipo
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
from headrace.algo.losses.supervised import cross_entropy, distillation
from headrace.algo.losses.surrogate import importance_sampling, ppo
from headrace.algo.losses.value import shared_value, value, value_clipped
from headrace.algo.name_lookup import lookup

LOSSES: Mapping[str, LossFn] = {
    "cross_entropy": cross_entropy,
    "distillation": distillation,
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
    "dpo": dpo,
    "ipo": ipo,
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
    """A loss by name, a sum of names ("ppo + entropy_bonus"), or the function itself.

    Raises ConfigError that names the nearest one.
    """
    if not isinstance(fn, str):
        return fn
    return sum_losses([lookup(LOSSES, name.strip(), "loss") for name in fn.split("+")])
