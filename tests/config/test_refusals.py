"""What other frameworks have and this one does not is refused by name, with what to write instead."""

import pytest

from headrace.config import load_config
from headrace.errors import ConfigError

RL = '[rl]\nsteps = 2\ntasks = { type = "env", name = "key_door" }\n'
RANKS = "write 'cluster.ranks' = the number of GPUs"


def error_of(text: str = RL, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(text, file="run.toml", overrides=overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("cluster.backend=megatron", "cluster.backend"),
        ("model.trainer=Megatron-LM", "model.trainer"),
        ("cluster.megatron.tensor_model_parallel_size=2", "cluster.megatron"),
        ("use_mbridge=true", "use_mbridge"),
        ("trainer.strategy=megatron", "trainer"),
        ("engine.type=megatron", "engine.type"),
        ("mcore.bf16=true", "mcore"),
    ],
)
def test_megatron_is_refused_by_name(override: str, key: str) -> None:
    said = error_of(RL, override)
    assert said.startswith(f"--set {override}: '{key}' asks for Megatron (mbridge), which is not used here: {RANKS}")


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.backend=jax", "model.backend"),
        ("cluster.jax=true", "cluster.jax"),
        ("jax.platform=tpu", "jax"),
        ("model.device=tpu", "model.device"),
        ("engine.type=jax", "engine.type"),
        ("model.use_flax=true", "model.use_flax"),
    ],
)
def test_jax_is_refused_by_name(override: str, key: str) -> None:
    said = error_of(RL, override)
    assert said.startswith(
        f"--set {override}: '{key}' asks for JAX, which is not used here: models are PyTorch modules"
    )
    assert RANKS in said


@pytest.mark.parametrize(
    "key",
    ["cluster.tensor_parallel_size", "engine.tensor_parallel_size", "model.pipeline-parallel-size", "rl.cp_size"],
)
def test_forms_of_parallelism_are_refused_by_name(key: str) -> None:
    said = error_of(RL, f"{key}=2")
    assert f"'{key}' asks for tensor, pipeline, context or expert parallelism" in said
    assert RANKS in said
    assert "'engine.launch.args'" in said


def test_a_file_is_answered_as_an_override_is() -> None:
    assert error_of(RL + "[cluster]\nmegatron = true\n").startswith("run.toml: 'cluster.megatron' asks for Megatron")


def test_other_unknown_keys_and_values_are_answered_as_before() -> None:
    assert "did you mean 'rl.steps'?" in error_of(RL, "rl.step=2")
    assert 'must be one of "embedded", "generate", "vllm", "sglang", but it is "tgi"' in error_of(RL, "engine.type=tgi")
    assert load_config(RL, file="run.toml", overrides=["run.name=jax"]).run.name == "jax"
