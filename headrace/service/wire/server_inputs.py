"""Parse and check what the server is asked to do besides the loss: log-probs of a reference model, advantages by GAE,
a limit of the KL.

All are asked for in `loss_fn_config`; `evaluation.reference_scoring`, `training.server_gae` and `host.kl_bound` do it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.algo.loss_signature import LossFn, loss_inputs
from headrace.errors import RequestError
from headrace.service.host.kl_bound import SAMPLER, KlBound
from headrace.service.wire.messages import WireForward
from headrace.types import Datum

REFERENCE, GAMMA, LAMBDA, WHITEN = "reference_model", "gae_gamma", "gae_lambda", "gae_whiten"
REFERENCE_LOGPROBS, WEIGHTS, REWARDS, DONES = "reference_logprobs", "weights", "rewards", "dones"
KL_LIMIT, KL_ACTION, KL_ACTIONS = "kl_limit", "kl_action", ("discard", "scale_back")
ESTIMATED = ("advantages", "returns", "values", "value_weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class GaeSettings:
    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = False  # advantages get mean 0 and standard deviation 1 over the request's sampled tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInputs:
    """Inputs that the server computes, and the limit that it enforces; None: not asked for."""

    reference: str | None = None  # the model whose log-probs the data get
    gae: GaeSettings | None = None  # advantages from the model's own values
    bound: KlBound | None = None  # of the KL to the sampler after the next update

    @property
    def provides(self) -> tuple[str, ...]:
        """Name the arrays that the server adds to the data."""
        return (*((REFERENCE_LOGPROBS,) if self.reference is not None else ()), *(ESTIMATED if self.gae else ()))

    @property
    def reads(self) -> tuple[str, ...]:
        """Name the inputs that the server reads, whether the loss reads them or not."""
        return (*((WEIGHTS, REWARDS, DONES) if self.gae else ()), *(("logprobs", SAMPLER) if self.bound else ()))


NO_SERVER_INPUTS = ServerInputs()


def parse_server_inputs(request: WireForward) -> tuple[WireForward, ServerInputs]:
    """Split a request into itself without the server's inputs, and those; raises RequestError."""
    config = dict(request.config)
    reference = config.pop(REFERENCE, None)
    if reference is not None and not (isinstance(reference, str) and reference):
        raise RequestError(f"'{REFERENCE}' must be a text: base, a tinker:// path, or a name that this server knows")
    gae = None
    if any(name in config for name in (GAMMA, LAMBDA, WHITEN)):
        gamma, lam, whiten = (
            _fraction(config.pop(name, default), name)
            for name, default in ((GAMMA, GaeSettings().gamma), (LAMBDA, GaeSettings().lam), (WHITEN, 0.0))
        )
        gae = GaeSettings(gamma=gamma, lam=lam, whiten=bool(whiten))
    bound = _bound(config.pop(KL_LIMIT, None), config.pop(KL_ACTION, None))
    return replace(request, config=config), ServerInputs(reference=reference, gae=gae, bound=bound)


def _bound(limit: float | str | None, action: float | str | None) -> KlBound | None:
    if limit is None:
        if action is not None:
            raise RequestError(f"'{KL_ACTION}' is given without a limit: add '{KL_LIMIT}', a KL in nats per token")
        return None
    if isinstance(limit, str) or not 0.0 < limit < math.inf:
        raise RequestError(f"'{KL_LIMIT}' must be a number above 0, in nats per token, not {limit!r}")
    match action:
        case None | "discard":
            return KlBound(limit=float(limit))
        case "scale_back":
            return KlBound(limit=float(limit), action="scale_back")
    raise RequestError(f"'{KL_ACTION}' must be {' or '.join(KL_ACTIONS)}, not {action!r}")


def to_config(server_inputs: ServerInputs) -> dict[str, float | str]:
    """Write them as `parse_server_inputs` reads them."""
    config: dict[str, float | str] = {} if server_inputs.reference is None else {REFERENCE: server_inputs.reference}
    if server_inputs.gae is not None:
        gae = server_inputs.gae
        config |= {GAMMA: gae.gamma, LAMBDA: gae.lam, WHITEN: float(gae.whiten)}
    if server_inputs.bound is not None:
        config |= {KL_LIMIT: server_inputs.bound.limit, KL_ACTION: server_inputs.bound.action}
    return config


def check_server_inputs(server_inputs: ServerInputs, loss: LossFn, name: str, data: Sequence[Datum]) -> None:
    """Raise RequestError when an input is of no use to the loss, is there already, or cannot be computed."""
    inputs = loss_inputs(loss)
    read = {*inputs.required, *inputs.optional}
    if server_inputs.reference is not None and REFERENCE_LOGPROBS not in read:
        raise RequestError(
            f"loss '{name}' reads no {REFERENCE_LOGPROBS}: leave {REFERENCE} out, or add a term, as in "
            f"'{name} + reference_kl_k3'"
        )
    if server_inputs.gae is not None and not read & {"advantages", "returns"}:
        raise RequestError(f"loss '{name}' reads neither advantages nor returns: leave {GAMMA} and {LAMBDA} out")
    for index, datum in enumerate(data):
        present = [name for name in server_inputs.provides if name in datum.arrays]
        if present:
            raise RequestError(f"datum {index} has '{present[0]}', which the server was asked to compute: choose one")
        if server_inputs.gae is not None:
            _check_rewards(datum, index)
        if server_inputs.reference is not None:
            _check_next_tokens(datum, index)
        if server_inputs.bound is not None and (SAMPLER not in datum.arrays or datum.targets.ndim != 1):
            raise RequestError(
                f"datum {index}: '{KL_LIMIT}' needs the input 'logprobs' of the policy that sampled, one per token"
            )


def _check_next_tokens(datum: Datum, index: int) -> None:
    """Check that targets are the next tokens where they count: a reference model scores a sequence of tokens."""
    if datum.targets.ndim != 1:
        raise RequestError(f"datum {index}: a {REFERENCE} needs one target per token")
    counts = datum.arrays[WEIGHTS][:-1] != 0
    if (datum.targets[:-1][counts] != datum.inputs[1:][counts]).any():
        raise RequestError(f"datum {index}: a {REFERENCE} needs targets that are the next tokens of model_input")


def _check_rewards(datum: Datum, index: int) -> None:
    if datum.targets.ndim != 1:
        raise RequestError(f"datum {index}: GAE needs one target per token")
    for name in (REWARDS, WEIGHTS):
        if name not in datum.arrays:
            what = "1 for every sampled token, 0 elsewhere" if name == WEIGHTS else "one per token"
            raise RequestError(f"datum {index}: GAE needs the input '{name}', {what}")
    unsampled = datum.arrays[WEIGHTS] == 0
    for name in (REWARDS, DONES):
        if name in datum.arrays and datum.arrays[name][unsampled].any():
            raise RequestError(f"datum {index}: {name} must be 0 where weights is: no token was sampled there")
    if DONES in datum.arrays and not np.isin(datum.arrays[DONES], (0.0, 1.0)).all():
        raise RequestError(f"datum {index}: dones must be 1 where an episode ends, and 0 elsewhere")


def _fraction(value: float | str, name: str) -> float:
    if isinstance(value, str) or not 0.0 <= value <= 1.0:
        raise RequestError(f"'{name}' must be a number from 0 to 1, not {value!r}")
    return float(value)
