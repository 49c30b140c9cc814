"""What other frameworks have and this one does not is refused by name, with what to write instead."""

import pytest

from headrace.config import load_config
from headrace.errors import ConfigError
from support.paths import DOCS

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
        ("model.backend=torchax_backend", "model.backend"),
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
    ("override", "key"),
    [
        ("model.backend=torch_func", "model.backend"),
        ("model.torch_func=true", "model.torch_func"),
        ("torch-func.jit=true", "torch-func"),
        ("engine.type=torch_func", "engine.type"),
    ],
)
def test_torch_func_is_refused_by_name(override: str, key: str) -> None:
    said = error_of(RL, override)
    assert said.startswith(f"--set {override}: '{key}' asks for torch.func, a model as a function of its weights")
    assert "'rl.loss' = \"file.py:function\"" in said


@pytest.mark.parametrize("name", ["jax_backend", "torchax_backend", "torch_func"])
def test_the_page_of_names_has_what_the_answer_says(name: str) -> None:
    [row] = [line for line in (DOCS / "names.md").read_text().splitlines() if f"`{name}`" in line]
    answer = error_of(RL, f"model.{name}=true").partition(" asks for ")[2]
    assert answer in row


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


@pytest.mark.parametrize(
    ("override", "asked_for"),
    [
        ("model.qlora=true", "QLoRA: a base model in 4 or 8 bits cannot be trained here"),
        ("model.lora.type=qlora", "QLoRA"),
        ("model.quantization_config={bnb_4bit_quant_type='nf4'}", "QLoRA"),
        ("model.lora.use_dora=true", "a way of training that is not here: [model.lora] trains LoRA adapters"),
        ("model.lora.modules_to_save=['lm_head']", "a way of training that is not here"),
        ("model.lora.dropout=0.1", "noise in training (dropout, NEFTune), which is not used"),
        ("rl.neftune_noise_alpha=5", "noise in training (dropout, NEFTune)"),
        ("rl.train_on_inputs=true", "a loss on prompts, which is not computed"),
        ("cluster.deepspeed='zero3.json'", f"DeepSpeed, which is not used here: {RANKS}"),
    ],
)
def test_what_tutorials_set_and_we_do_not_have_is_refused_by_name(override: str, asked_for: str) -> None:
    key = override.partition("=")[0]
    assert f"'{key}' asks for {asked_for}" in error_of(RL, override)


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("rl.num_train_epochs=3", "'rl.epochs'"),
        ("model.chat_template_kwargs={enable_thinking=false}", "'model.template_options'"),
        ("model.lora.use_rslora=true", "'model.lora.rslora'"),
    ],
)
def test_what_has_another_name_here_is_answered_with_it(override: str, ours: str) -> None:
    assert f"this is TRL's name; write {ours}" in error_of(RL, override)
