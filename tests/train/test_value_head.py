"""Scalar heads: what transformers loads, what the backend trains with them; scoring with models that stand still."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headrace.algo.datum import all_tokens, scalar_datum, scored_datum, shift
from headrace.algo.units import as_pairs
from headrace.errors import BackendError, ModelError
from headrace.model.load import LanguageModel, prepare
from headrace.model.lora import add_lora
from headrace.model.value_head import has_scalar_head, is_scalar_folder, load_scalar_model, with_scalar_head
from headrace.train.frozen_model import FrozenScorer
from headrace.train.torch_backend import TorchBackend
from headrace.types import CROSS_ENTROPY, Adam, Datum, LossSpec, float_array, int_array

VOCABULARY = 32
VALUE = LossSpec(fn="value", params={"value_coef": 1.0})
PREFERENCE = LossSpec(fn="bradley_terry")
SEQUENCES = ([5, 9, 1], [4, 4, 8, 20, 1], [30, 2, 7, 11], [3, 1])  # 1 ends a turn, and is the padding token


def tiny_model(*, lora_rank: int = 0) -> LanguageModel:
    """A Llama of a few thousand parameters, the same weights at every call."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCABULARY)}, unk_token="w2"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1", unk_token="w2")
    lm = prepare(LlamaForCausalLM(config), tokenizer, source="tiny")
    if lora_rank:
        add_lora(lm.model, rank=lora_rank, alpha=8.0, targets=("q_proj", "down_proj"), seed=0)
    return lm


def scalar_model(*, lora_rank: int = 0) -> LanguageModel:
    """The tiny model under a head whose weights are not zero."""
    lm = with_scalar_head(tiny_model(lora_rank=lora_rank))
    with torch.no_grad():
        lm.model.score.weight.copy_(torch.linspace(-1.0, 1.0, lm.model.config.hidden_size)[None])
    return lm


def value_data() -> list[Datum]:
    """Returns that grow along each sequence, on every token."""
    return [
        scalar_datum(
            int_array(tokens),
            {"weights": np.ones(len(tokens)), "returns": np.arange(len(tokens)) / 4.0},
        )
        for tokens in SEQUENCES
    ]


def close(backend: TorchBackend) -> None:
    backend.close()


def test_transformers_reads_the_same_score_from_a_saved_model(tmp_path: Path) -> None:
    backend = TorchBackend(scalar_model())
    backend.save_state(tmp_path).result()
    data = [scored_datum(int_array(tokens)) for tokens in SEQUENCES]
    ours = [float(scores[-1]) for scores in FrozenScorer(backend.lm).score(data)]
    close(backend)
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = [float(theirs(input_ids=torch.tensor([tokens])).logits) for tokens in SEQUENCES]
    assert ours == pytest.approx(expected, abs=1e-5)
    assert len({round(score, 4) for score in ours}) == len(SEQUENCES), "the sequences must differ for this to mean much"
    assert is_scalar_folder(tmp_path)
    again = load_scalar_model(str(tmp_path))
    assert [float(scores[-1]) for scores in FrozenScorer(again).score(data)] == pytest.approx(ours, abs=1e-6)


def test_a_new_head_says_zero_everywhere_and_its_trunk_is_the_models() -> None:
    before = tiny_model()
    embeddings = before.model.get_input_embeddings().weight.detach().clone()
    lm = with_scalar_head(before)
    assert has_scalar_head(lm)
    assert torch.equal(lm.model.get_input_embeddings().weight, embeddings)
    assert [scores.tolist() for scores in FrozenScorer(lm).score([scored_datum(int_array([5, 6, 7]))])] == [[0, 0, 0]]


def test_a_classifier_of_several_labels_is_not_a_reward_model(tmp_path: Path) -> None:
    lm = scalar_model()
    lm.model.config.num_labels = 3
    lm.model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="3 labels"):
        load_scalar_model(str(tmp_path))


def test_value_regression_learns() -> None:
    backend = TorchBackend(scalar_model(), micro_batch_tokens=8)
    first = backend.forward(value_data(), VALUE).result()
    for _ in range(60):
        backend.forward_backward(value_data(), VALUE).result()
        backend.optim_step(Adam(learning_rate=1e-2)).result()
    assert backend.forward(value_data(), VALUE).result().loss < 0.05 * first.loss
    assert [len(values) for values in first.logprobs] == [len(tokens) for tokens in SEQUENCES]
    close(backend)


def test_the_first_update_does_not_depend_on_the_split() -> None:
    values: list[list[float]] = []
    for budget in (4, 64):
        backend = TorchBackend(scalar_model(), micro_batch_tokens=budget)
        backend.forward_backward(value_data(), VALUE).result()
        backend.optim_step(Adam(learning_rate=1e-2)).result()
        values.append([float(v) for out in backend.forward(value_data(), VALUE).result().logprobs for v in out])
        close(backend)
    assert values[0] == pytest.approx(values[1], abs=1e-4)


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_saved_critic_goes_on_exactly(tmp_path: Path, lora_rank: int) -> None:
    def run(backend: TorchBackend, steps: int) -> None:
        for _ in range(steps):
            backend.forward_backward(value_data(), VALUE).result()
            backend.optim_step(Adam(learning_rate=1e-2)).result()

    def critic() -> TorchBackend:
        lm = scalar_model(lora_rank=lora_rank)
        lm.model.score.requires_grad_(True)
        return TorchBackend(lm)

    whole, part, resumed = critic(), critic(), critic()
    run(whole, 4)
    run(part, 2)
    part.save_state(tmp_path).result()
    resumed.load_state(tmp_path).result()
    run(resumed, 2)
    left, right = [backend.forward(value_data(), VALUE).result().logprobs for backend in (whole, resumed)]
    assert all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))
    for backend in (whole, part, resumed):
        close(backend)


def test_preferences_are_learned_by_the_last_tokens_score() -> None:
    chosen = [scored_datum(int_array([token, 9, 1])) for token in (5, 6, 7)]
    rejected = [scored_datum(int_array([token, 10, 1])) for token in (5, 6, 7)]
    data = as_pairs(chosen, rejected)
    backend = TorchBackend(with_scalar_head(tiny_model()), micro_batch_tokens=6)
    # a head of zeros: every pair is at log 2
    assert backend.forward(data, PREFERENCE).result().loss == pytest.approx(3 * np.log(2.0), rel=1e-5)
    for _ in range(20):
        backend.forward_backward(data, PREFERENCE).result()
        backend.optim_step(Adam(learning_rate=1e-2)).result()
    out = backend.forward(data, PREFERENCE).result()
    assert out.metrics["loss/accuracy"].value() == 1.0
    assert out.loss < 0.5
    close(backend)


def test_a_loss_of_the_other_head_is_refused() -> None:
    scalar, causal = TorchBackend(scalar_model()), TorchBackend(tiny_model())
    datum = shift(int_array([3, 4, 5]), {"weights": float_array([0, 1, 1])})
    with pytest.raises(BackendError, match="has a scalar head"):
        scalar.forward([datum], CROSS_ENTROPY).result()
    with pytest.raises(BackendError, match="needs a scalar head"):
        causal.forward(value_data(), VALUE).result()
    close(scalar)
    close(causal)


# --- models that stand still -----------------------------------------------------------------------------------------


def trained_data() -> list[Datum]:
    rng = np.random.default_rng(0)
    return [
        shift(
            int_array(rng.integers(0, VOCABULARY, size=length)),
            {"weights": (np.arange(length) % 3 != 0).astype(np.float32)},
            temperature=temperature,
        )
        for length, temperature in ((7, 1.0), (4, 0.7), (12, 1.3))
    ]


def test_a_frozen_scorer_gives_the_backends_logprobs_where_there_is_a_weight() -> None:
    backend = TorchBackend(tiny_model(), micro_batch_tokens=16)
    expected = backend.forward(trained_data(), CROSS_ENTROPY).result().logprobs
    scored = FrozenScorer(tiny_model(), micro_batch_tokens=8).score(trained_data())
    for ours, theirs in zip(scored, expected, strict=True):
        assert np.allclose(ours, np.nan_to_num(theirs, nan=0.0), atol=1e-5)
        assert (ours[np.isnan(theirs)] == 0).all()
    close(backend)


def test_the_base_of_an_adapted_model_stays_where_it_started() -> None:
    lm = tiny_model(lora_rank=2)
    backend = TorchBackend(lm)
    base, adapted = FrozenScorer(lm, base_only=True), FrozenScorer(lm)
    before = [scores.tolist() for scores in base.score(trained_data())]
    for _ in range(3):
        backend.forward_backward(trained_data(), CROSS_ENTROPY).result()
        backend.optim_step(Adam(learning_rate=1e-2)).result()
    assert [scores.tolist() for scores in base.score(trained_data())] == before
    assert [scores.tolist() for scores in adapted.score(trained_data())] != before
    close(backend)


def test_the_tokens_of_a_shifted_datum_come_back_whole() -> None:
    tokens = int_array([3, 1, 4, 1, 5])
    datum = shift(tokens, {"weights": float_array([0, 1, 1, 1, 1])})
    assert all_tokens(datum).tolist() == [3, 1, 4, 1, 5]
    assert scored_datum(tokens).arrays["weights"].tolist() == [0, 0, 0, 0, 1]
