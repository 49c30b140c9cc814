"""Check a run whose model is trained and sampled at a service: [model] service = "http://..."."""

from collections.abc import Iterator, Mapping, Sequence

from headrace.config.introspect import default_of
from headrace.config.paths import remote_name, split_sum
from headrace.config.schema import Config, EngineConfig, LoraConfig, ModelConfig, RlConfig

ALPHA = 32.0  # of every adapter at a service
# the flags of a client's request, and the layers that each stands for
LAYERS: Mapping[str, tuple[str, ...]] = {
    "train_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "train_mlp": ("gate_proj", "up_proj", "down_proj"),
    "train_unembed": ("lm_head",),
}


def service_layers(targets: Sequence[str]) -> dict[str, bool] | None:
    """Express `model.lora.targets` as a service takes them, in whole kinds of layers; None if that is impossible.

    >>> service_layers(("q_proj", "k_proj", "v_proj", "o_proj"))
    {'train_attn': True, 'train_mlp': False, 'train_unembed': False}
    >>> service_layers(("q_proj", "v_proj")) is None
    True
    """
    chosen = {flag: set(names) <= set(targets) for flag, names in LAYERS.items()}
    covered = {name for flag, names in LAYERS.items() if chosen[flag] for name in names}
    return chosen if targets and covered == set(targets) else None


def service_problems(config: Config) -> Iterator[str]:
    """Yield what cannot work at a service."""
    model = config.model
    if model.service is None:
        return
    if not model.service.startswith(("http://", "https://")):
        yield f"'model.service' is \"{model.service}\": it must start with http:// or https://"
    if remote_name(model.path) is not None:
        return  # a remote model plays; the service has no part in it
    yield from _model_problems(model)
    if config.engine != EngineConfig():
        yield "[engine] is of a model that is sampled here, and the service has its own: leave the table out"
    if config.run.deterministic:
        yield "'run.deterministic' is of a model that is computed here, not at 'model.service': leave it out"
    if config.distill is not None:
        yield "[distill] has a teacher that is computed here: leave it out, or 'model.service'"
    if config.dpo is not None:
        yield "[dpo] is trained with a model that is computed here: leave it out, or 'model.service'"
    if config.reward_model is not None:
        yield "a service trains no reward model: leave [reward_model] out, or 'model.service'"
    if config.eval.temperature != 1.0:
        yield _sampled_at_one("eval.temperature", config.eval.temperature)
    if config.rl is not None:
        yield from _rl_problems(config.rl)


def _model_problems(model: ModelConfig) -> Iterator[str]:
    for key in ("device", "dtype", "tiny", "recompute", "compile", "router_aux_loss"):
        if getattr(model, key) != default_of(ModelConfig, key):
            yield f"'model.{key}' is of a model that is computed here, not at 'model.service': leave it out"
    lora = model.lora or LoraConfig()
    if lora.alpha != ALPHA:
        yield f"'model.lora.alpha' is {lora.alpha:g}, but at a service it is always {ALPHA:g}: leave it out"
    if lora.rslora:
        yield "'model.lora.rslora' is true, but a service scales adapters by alpha / rank: leave it out"
    if service_layers(lora.layers) is None:
        kinds = "; ".join(", ".join(names) for names in LAYERS.values())
        yield f"'model.lora.targets' at a service are whole kinds of layers ({kinds}): name all of a kind or none"


def _rl_problems(rl: RlConfig) -> Iterator[str]:
    if rl.critic is not None:
        yield "a service keeps no critic beside the policy: leave [rl.critic] out, or 'model.service'"
    fns = [term for term in split_sum(rl.loss) if ":" in term]
    if fns:
        yield f"'rl.loss' is \"{fns[0]}\", a function, which stays on this machine: a service takes losses by name"
    if rl.kl_action == "scale_back":
        yield '\'rl.kl_action\' is "scale_back", and a service cannot take an update back: write "discard"'
    for key in ("reference", "teacher"):
        if getattr(rl, key) is not None:
            yield f"'rl.{key}' is a folder here, and the model is at 'model.service': leave it out"
    if rl.sampling.temperature != 1.0:
        yield _sampled_at_one("rl.sampling.temperature", rl.sampling.temperature)
    if rl.sampling.min_p:
        yield "'rl.sampling.min_p' is not known to a service: leave it out"
    if rl.asynchronous.interrupt == "inflight":
        yield (
            "'rl.async.interrupt' is \"inflight\", and a service keeps no keys and values over a change of weights: "
            'write "abort" or "drain"'
        )
    if rl.asynchronous.lockstep_tokens:
        yield "'rl.async.lockstep_tokens' is for a model that is sampled here, not at 'model.service': leave it out"


def _sampled_at_one(key: str, temperature: float) -> str:
    return f"'{key}' is {temperature:g}, but a service tells log-probs at temperature 1 only: leave it out"
