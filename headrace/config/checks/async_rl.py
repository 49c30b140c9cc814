"""Check [rl.async], and [rl.correction], which sets the same weights of stale tokens in more forms."""

from collections.abc import Iterator

from headrace.config.paths import split_sum
from headrace.config.schema import AsyncConfig, EngineConfig, RlConfig

# losses whose ratio is to the sampler, and so already corrects a token's age. A test derives them from their signatures
SAMPLER_RATIO = (
    "distillation",
    "importance_sampling",
    "ppo",
    "conservative_ppo",
    "loglinear_ppo",
    "m2po",
    "gspo",
    "gspo_token",
    "sequence_ppo",
    "cispo",
    "aipo",
    "tis",
    "mis",
    "icepop",
    "sequence_tis",
    "sequence_mis",
    "geometric_mis",
    "sapo",
    "reference_kl_weighted",
)
BOUNDS = ("weight_cap", "weight_floor", "cap_action")  # of [rl.async]; those of [rl.correction] have other names


def async_problems(rl: RlConfig, engine: EngineConfig) -> Iterator[str]:
    """Yield what cannot work in [rl.async] and [rl.correction]."""
    c = rl.asynchronous
    if c.interrupt == "inflight" and c.lockstep_tokens:
        yield (
            "'rl.async.lockstep_tokens' repeats a run exactly, and keys and values that 'rl.async.interrupt' = "
            '"inflight" keeps cannot be computed again: write "abort", or leave the first out'
        )
    if c.interrupt == "inflight" and engine.type == "generate":
        yield (
            f'\'rl.async.interrupt\' is "inflight", but engine "{engine.type}" keeps no keys and values: '
            'write "abort" or "drain"'
        )
    if c.weight_floor > c.weight_cap:
        yield (
            f"'rl.async.weight_floor' is {c.weight_floor}, above 'rl.async.weight_cap', which is {c.weight_cap}: "
            "lower the first or raise the second"
        )
    yield from _weight_problems(rl)
    if c.select == "best" and c.oversampling == 1.0:
        yield "'rl.async.select' is \"best\", but no group is left over: write 'rl.async.oversampling' above 1"
    if c.replay_groups and not c.max_staleness:
        yield (
            "'rl.async.replay_groups' asks for groups of earlier batches, which are at least one version old: "
            "write 'rl.async.max_staleness' of 1 or more"
        )


def _weight_problems(rl: RlConfig) -> Iterator[str]:
    """Yield settings that would correct a token's age twice, or not at all.

    Only a loss without a ratio to the sampler takes the weights of stale tokens; users' losses are not judged.
    """
    behaviour, terms = rl.asynchronous.behaviour_weight, split_sum(rl.loss)
    bounds = [key for key in BOUNDS if getattr(rl.asynchronous, key) != getattr(AsyncConfig(), key)]
    if rl.correction is not None:
        for key in (["behaviour_weight"] if behaviour is not None else []) + bounds:
            yield f"'rl.async.{key}' and [rl.correction] say the same thing twice: leave one of them out"
    if "decoupled_ppo" in terms or any(":" in term for term in terms):
        return
    if behaviour not in (None, "none"):  # none is what such a loss has
        yield (
            f'\'rl.async.behaviour_weight\' is "{behaviour}", but the ratio of loss "{rl.loss}" is to the '
            "sampler and would count a token's age twice: write 'rl.loss = \"decoupled_ppo\"', or leave it out"
        )
    for key in bounds:
        yield (
            f"'rl.async.{key}' bounds weights of stale tokens, which loss \"{rl.loss}\" does not have: "
            "write 'rl.loss = \"decoupled_ppo\"', or leave it out"
        )
    twice = [term for term in terms if term in SAMPLER_RATIO]
    if twice and rl.correction is not None and rl.correction.behaviour != "none":
        yield (
            f'\'rl.correction.behaviour\' is "{rl.correction.behaviour}", but the ratio of loss "{twice[0]}" is to '
            "the sampler and would count a token's age twice: write 'rl.loss = \"decoupled_ppo\"', or "
            "'rl.correction.behaviour = \"none\"'"
        )
