"""Build the models beside the policy in [rl]: the critic, frozen models that score, the limit of the KL."""

from headrace.algo.datum import SequenceUnit
from headrace.algo.loss_signature import loss_inputs
from headrace.algo.losses import find_loss
from headrace.config import CriticConfig as CriticConfig
from headrace.config import RlConfig, num_steps
from headrace.config.paths import is_url
from headrace.loops.critic import Critic, CriticSettings
from headrace.loops.kl_limit import COEF, KlLimit
from headrace.loops.step_batch import Score, backend_scorer, required_arrays
from headrace.loops.update import Updater
from headrace.names import REWARD_MODEL
from headrace.process.watchdog import watching_thread
from headrace.protocols import TrainBackend
from headrace.types import LossSpec
from headrace.wiring.build.loss import make_adam
from headrace.wiring.build.models import whole
from headrace.wiring.inputs import RlFunctions
from headrace.wiring.stage_context import StageContext, stage_start


def make_critic(c: RlConfig, critic: CriticConfig, context: StageContext) -> Critic:
    """Build the critic: a value model with its own trunk and optimiser, or a head on the policy's trunk."""
    shared = critic.trunk == "shared"
    backend = context.backend if shared else _open_trunk(c, critic, context)
    resumed = context.resumed
    updater = None
    if not shared:
        updater = Updater(
            backend=backend,
            adam=make_adam(critic.optimizer, num_steps(c)),
            max_skips=critic.optimizer.max_skips,
            skips_in_a_row=0 if resumed is None else int(resumed.state["critic_skips_in_a_row"]),
        )
    return Critic(
        settings=CriticSettings(
            credit=c.credit,
            gamma=critic.gamma,
            lam=critic.lam,
            value_coef=critic.value_coef,
            value_clip=critic.value_clip,
            whiten=critic.whiten,
            kl_coef=critic.kl_coef,
            kl_estimator=critic.kl_estimator,
            bootstrap=critic.bootstrap,
            minibatches=c.minibatches,
            rows=SequenceUnit(c.sequence_unit),
        ),
        backend=backend,
        updater=updater,
        reference=open_frozen(context, c.reference, micro_batch_tokens=c.micro_batch_tokens)
        if critic.kl_coef
        else None,
    )


def _open_trunk(c: RlConfig, critic: CriticConfig, context: StageContext) -> TrainBackend:
    """Load the critic's own trunk: from the checkpoint, or from `rl.critic.path`, or from the policy's start."""
    state, resumed = context.state, context.resumed
    start = (state.reward_model_path if critic.path == REWARD_MODEL else critic.path) or state.model_path
    saved = None if resumed is None else resumed.folder / "critic"
    adapters = context.run.config.model.lora is not None
    path = whole(start) if saved is None or adapters else str(saved)
    with watching_thread("loading the critic", loads=True):
        return context.runtime.open_critic(path, micro_batch_tokens=c.micro_batch_tokens, state=saved)


def make_kl_limit(c: RlConfig, limit: float, context: StageContext, loss: LossSpec) -> KlLimit:
    """Build the limit on how far one training step may take the policy."""
    params = {**loss_inputs(find_loss(loss.fn)).params, **loss.params}
    resumed = context.resumed
    return KlLimit(
        limit=limit,
        policy=backend_scorer(context.backend),
        backend=context.backend if c.kl_action == "scale_back" else None,
        coef=params.get(COEF),
        doublings=0.0 if resumed is None else float(resumed.state.get("kl_coef_doublings", 0.0)),
    )


def make_scorers(c: RlConfig, context: StageContext, functions: RlFunctions) -> dict[str, Score]:
    """Build what computes the log-probs that the loss needs besides the sampler's."""
    required = required_arrays(find_loss(functions.loss.fn), correction=functions.correction)
    scorers: dict[str, Score] = {}
    if "proximal_logprobs" in required or c.kl_limit is not None:
        scorers["proximal_logprobs"] = backend_scorer(context.backend)
    for name, path in (("reference_logprobs", c.reference), ("teacher_logprobs", c.teacher)):
        if name in required:
            scorers[name] = open_frozen(context, path, micro_batch_tokens=c.micro_batch_tokens)
    return scorers


def open_frozen(context: StageContext, path: str | None, *, micro_batch_tokens: int) -> Score:
    """Load a frozen model that scores: that of a folder or URL, or the one that the stage started from."""
    if context.cluster is not None and not (path is not None and is_url(path)):
        folder = stage_start(context.state) if path is None else whole(path)
        scorer = context.cluster.frozen(folder)
        if scorer is not None:
            return scorer
    with watching_thread("loading a frozen model", loads=True):
        return context.runtime.open_frozen(path, micro_batch_tokens=micro_batch_tokens)
