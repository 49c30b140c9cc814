"""What works beside the policy in [rl]: the critic, frozen models that score, the limit of the KL."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import replace

from headrace.algo.datum import Rows
from headrace.algo.loss import loss_inputs
from headrace.algo.losses import find_loss
from headrace.config import Critic as CriticConfig
from headrace.config import Rl
from headrace.config.paths import is_url
from headrace.errors import ModelError
from headrace.loops.arrays import Score, scored_by_backend, scored_on_thread, wanted_arrays
from headrace.loops.critic import Critic, CriticSettings
from headrace.loops.trust import COEF, TrustRegion
from headrace.loops.update import Updater
from headrace.names import REWARD_MODEL
from headrace.service.reference_client import REFERENCE_KEY, RemoteReference
from headrace.train.scorer import FrozenScorer
from headrace.train.torch_backend import TorchBackend
from headrace.types import Datum, FloatArray, LossSpec
from headrace.wiring.desk import Desk
from headrace.wiring.models import load_policy, load_scalar, whole
from headrace.wiring.objective import make_adam, make_correction
from headrace.wiring.remote import AtService


def make_critic(c: Rl, own: CriticConfig, desk: Desk) -> Critic:
    """The value model with its own trunk, and optimiser, or the head on the policy's; either goes on from where
    the checkpoint left it."""
    shared = own.trunk == "shared"
    backend = desk.backend if shared else _own_trunk(c, own, desk)
    found = desk.found
    return Critic(
        settings=CriticSettings(
            credit=c.credit,
            gamma=own.gamma,
            lam=own.lam,
            value_coef=own.value_coef,
            value_clip=own.value_clip,
            whiten=own.whiten,
            kl_coef=own.kl_coef,
            kl_estimator=own.kl_estimator,
            bootstrap=own.bootstrap,
            minibatches=c.minibatches,
            rows=Rows(c.rows),
        ),
        backend=backend,
        updater=None
        if shared
        else Updater(
            backend=backend,
            adam=make_adam(own.optimizer, c.steps),
            max_skips=own.optimizer.max_skips,
            skips_in_a_row=0 if found is None else int(found.state["critic_skips_in_a_row"]),
        ),
        reference=_frozen_score(c, desk, c.reference) if own.kl_coef else None,
    )


def _own_trunk(c: Rl, own: CriticConfig, desk: Desk) -> TorchBackend:
    config, found = desk.here.config, desk.found
    begin = (desk.run.reward_model_path if own.path == REWARD_MODEL else own.path) or desk.run.model_path
    resumed = found is not None and config.model.lora is None
    path = str(found.folder / "critic") if found is not None and resumed else whole(begin)
    backend = TorchBackend(
        load_scalar(config.model, path, seed=config.run.seed),
        micro_batch_tokens=c.micro_batch_tokens,
        worker=desk.here.worker,
    )
    desk.here.others.append(backend)
    if found is not None:
        backend.load_state(found.folder / "critic").result()
    return backend


def make_trust(c: Rl, limit: float, desk: Desk, loss: LossSpec) -> TrustRegion:
    numbers = {**loss_inputs(find_loss(loss.fn)).params, **loss.params}
    return TrustRegion(
        limit=limit,
        policy=scored_by_backend(desk.backend),
        backend=desk.backend if c.kl_action == "scale_back" else None,
        coef=numbers.get(COEF),
        doublings=0.0 if desk.found is None else float(desk.found.state["kl_coef_doublings"]),
    )


def make_scorers(c: Rl, desk: Desk, loss: LossSpec) -> dict[str, Score]:
    """Who computes the log-probs that the loss asks for beyond the sampler's."""
    wanted = wanted_arrays(find_loss(loss.fn), correction=make_correction(c, loss))
    scorers: dict[str, Score] = {}
    if "proximal_logprobs" in wanted or c.kl_limit is not None:
        scorers["proximal_logprobs"] = scored_by_backend(desk.backend)
    for name, path in (("reference_logprobs", c.reference), ("teacher_logprobs", c.teacher)):
        if name in wanted and isinstance(desk.place, AtService):
            assert path is None, "the configuration was checked"
            scorers[name] = scored_by_backend(desk.place.frozen())
        elif name in wanted:
            scorers[name] = _frozen_score(c, desk, path)
    return scorers


def _frozen_score(c: Rl, desk: Desk, path: str | None) -> Score:
    """A model here computes on the thread that computes; one at a URL (`headrace serve --reference`) is waited for."""
    if path is None or not is_url(path):
        return scored_on_thread(_frozen(c, desk, path).score, desk.here.worker.submit)
    remote = RemoteReference(path, key=os.environ.get(REFERENCE_KEY))
    desk.here.others.append(remote)

    async def score(data: Sequence[Datum]) -> Sequence[FloatArray]:
        return await asyncio.to_thread(remote.score, data)

    return score


def _frozen(c: Rl, desk: Desk, path: str | None) -> FrozenScorer:
    """A model that is not trained; None: the one the stage started from, which under adapters is the base itself."""
    model = desk.run.config.model
    if path is None and model.lora is not None:
        return FrozenScorer(desk.here.lm, micro_batch_tokens=c.micro_batch_tokens, base_only=True)
    lm = load_policy(
        replace(model, lora=None, recompute=False), desk.run.after_sft() if path is None else whole(path), seed=0
    )
    lm.model.requires_grad_(False)
    trained = desk.here.lm
    if lm.vocabulary != trained.vocabulary:
        raise ModelError(
            f"{path} has a vocabulary of {lm.vocabulary} tokens and the trained model one of {trained.vocabulary}: "
            "their log-probs cannot be compared"
        )
    return FrozenScorer(lm, micro_batch_tokens=c.micro_batch_tokens)
