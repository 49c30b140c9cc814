"""`verify` can fail: each property is broken on purpose, and it is that one which is found out."""

import logging
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headrace import wiring
from headrace.algo.advantages.credit import CreditedBatch, credit
from headrace.algo.datum import to_data
from headrace.algo.loss_signature import LossOut
from headrace.algo.losses import LOSSES
from headrace.cli import main
from headrace.envs import ENVIRONMENTS
from headrace.errors import BackendError, ModelError
from headrace.infer.determinism_check import CheckResult, check_bit_equality
from headrace.infer.engine import EmbeddedEngine
from headrace.model import attention
from headrace.model.load import LanguageModel, prepare
from headrace.model.lora import LoraLinear
from headrace.model.tiny import make_model, make_tokenizer
from headrace.process.watchdog import open_activities, watching
from headrace.render import Rendered, Renderer
from headrace.train.torch_backend import TorchBackend, make_optimizer
from headrace.types import (
    Completion,
    CreditedEpisode,
    Datum,
    ForwardOut,
    Group,
    LossSpec,
    Message,
    SampleRequest,
    float_array,
    int_array,
)
from headrace.verify import CHECKS, verify
from headrace.verify.gradient_check import compared, padded, relative_error, yardstick
from headrace.verify.mask_check import trained_tokens
from headrace.verify.property_result import Figure, PropertyResult, failures, rows
from headrace.verify.reference import Gradient, ReferenceForward
from headrace.verify.resume_check import relative_difference
from headrace.verify.subject import VerifySubject
from headrace.wiring.commands import verify as verify_command
from support.model_variants import VARIANTS, make
from support.paths import DOCS


def small(context: int = 512) -> LanguageModel:
    tokenizer = make_tokenizer(ENVIRONMENTS["key_door"].vocabulary())
    model = make_model(vocab_size=len(tokenizer), width=32, layers=2, heads=4, kv_heads=2, context=context, seed=0)
    return prepare(model, tokenizer, source="tests")


@pytest.fixture
def parts() -> VerifySubject:
    """The real ones, but for the check of bits, which takes longer than all the rest and sees none of these parts."""
    return replace(wiring.verify_parts(small()), check_bits=lambda lm: CheckResult(changed=0, detail="not looked at"))


def failed(parts: VerifySubject) -> tuple[str, ...]:
    return failures(list(verify(parts)))


def test_every_property_holds(parts: VerifySubject) -> None:
    weights = {name: value.clone() for name, value in parts.lm.model.named_parameters()}
    proofs = list(verify(replace(parts, check_bits=check_bit_equality)))
    assert failures(proofs) == ()
    names = [proof.name for proof in proofs]
    assert len(set(names)) == len(names) == 12
    explained = (DOCS / "verify.md").read_text()
    assert [name for name in names if f"**{name}**" not in explained] == []
    assert set(CHECKS) - set(names) == {"gradients"}  # which is five checks
    assert all(torch.equal(value, weights[name]) for name, value in parts.lm.model.named_parameters())


# --- broken on purpose -----------------------------------------------------------------------------------------------


def half_of_it(
    policy_logprobs_T: Tensor, sampler_logprobs_T: Tensor, advantages_T: Tensor, weights_T: Tensor
) -> LossOut:
    """Divided by two sequences, say, that were counted where there is one."""
    return LOSSES["ppo"](policy_logprobs_T, sampler_logprobs_T, advantages_T, weights_T / 2)


def test_a_loss_with_a_wrong_normalisation(parts: VerifySubject) -> None:
    assert failed(replace(parts, ppo=LossSpec(fn=half_of_it))) == ("loss and gradient are right",)


def a_ten_thousandth_more(
    policy_logprobs_T: Tensor, sampler_logprobs_T: Tensor, advantages_T: Tensor, weights_T: Tensor
) -> LossOut:
    return LOSSES["ppo"](policy_logprobs_T, sampler_logprobs_T, advantages_T, weights_T * 1.0001)


def test_an_error_just_above_rounding_is_seen(parts: VerifySubject) -> None:
    assert failed(replace(parts, ppo=LossSpec(fn=a_ten_thousandth_more))) == ("loss and gradient are right",)


def test_bounds_are_ten_times_what_plain_transformers_is_off_by() -> None:
    def reference(terms: list[float], gradient: list[float]) -> ReferenceForward:
        made = Gradient(loss=sum(terms) / len(terms), of={"w": torch.tensor(gradient, dtype=torch.float64)})
        return ReferenceForward(gradient=made, terms_N=torch.tensor(terms, dtype=torch.float64))

    exact = reference([1.0, 3.0], [3.0, 4.0])
    # the two losses are both 2, by luck: the tokens are off by 0.5 each, a quarter of the loss; |(0, 0.5)| / |(3, 4)|
    rounding = yardstick(exact, reference([1.5, 2.5], [3.0, 4.5]))
    assert (rounding.loss, rounding.gradient) == (pytest.approx(0.25), pytest.approx(0.1))
    figures = compared("loss", exact.gradient, exact.gradient, rounding)
    assert [figure.bound for figure in figures] == [pytest.approx(2.5), pytest.approx(1.0)]
    none = yardstick(exact, exact)
    assert none.loss == none.gradient == 2.0**-24


def test_attention_that_leaks_into_the_next_sequence(parts: VerifySubject, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = attention._packed

    def leaky(query: Tensor, key: Tensor, value: Tensor, context: attention.Packed, *rest: Any) -> Tensor:
        return alone(query, key, value, attention.Packed((sum(context.lengths),)), *rest)

    monkeypatch.setattr(attention, "_packed", leaky)
    packed = {"packing changes nothing", "the first step is on policy", "sampler and trainer agree"}
    assert set(failed(parts)) == packed  # the last two compare rows of several sequences with the sampler


def test_adapters_that_are_scaled_otherwise_than_merged_ones(
    parts: VerifySubject, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = LoraLinear.update

    def wrong(layer: LoraLinear, x: Tensor) -> Tensor | None:
        update = right(layer, x)
        return None if update is None else 1.01 * update

    monkeypatch.setattr(LoraLinear, "update", wrong)
    assert failed(parts) == ("adapters are merged weights",)


class ForgetsALayer(TorchBackend):
    """Doubles the gradient of one matrix."""

    def gradients(self) -> "Future[dict[str, Tensor]]":
        gradients = super().gradients().result()
        name = next(name for name in gradients if name.endswith("layers.1.mlp.up_proj.weight"))
        done: Future[dict[str, Tensor]] = Future()
        done.set_result({**gradients, name: 2 * gradients[name]})
        return done


def test_the_details_say_where_the_error_is(parts: VerifySubject) -> None:
    wrong = {
        result.name: result.detail for result in verify(replace(parts, make_trainer=ForgetsALayer)) if not result.ok
    }
    assert "100 % of the squared difference is in the gradient of" in wrong["loss and gradient are right"]
    assert wrong["loss and gradient are right"].endswith("model.layers.1.mlp.up_proj.weight")
    apart = {result.name: result.detail for result in verify(replace(parts, make_engine=Imprecise)) if not result.ok}
    assert re.search(r"apart most at position \d+ of request \d+, whose prompt", apart["sampler and trainer agree"])


# one whose laws all differ from Llama's; the others take a second each
TYPES = [
    pytest.param(variant, marks=[] if variant in ("gemma3_text", "gpt2") else pytest.mark.slow) for variant in VARIANTS
]


@pytest.mark.parametrize("variant", TYPES)
def test_every_property_holds_for_every_supported_type(variant: str) -> None:
    tokenizer = make_tokenizer(ENVIRONMENTS["key_door"].vocabulary())
    longer = "original_max_position_embeddings" if "long positions" in variant else "max_position_embeddings"
    model = make(variant, vocab_size=len(tokenizer), **{longer: 512})
    parts = wiring.verify_parts(prepare(model, tokenizer, source=variant))
    if variant in ("gemma3_text", "gpt2"):
        parts = replace(parts, check_bits=lambda lm: CheckResult(changed=0, detail="not looked at"))
    assert [(result.name, result.detail) for result in verify(parts) if not result.ok] == []


class MeanOverTheCall(TorchBackend):
    """Normalises each call by itself, which is right when a step is one call."""

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]":
        total = sum(float(datum.arrays["weights"].sum()) for datum in data)
        return super().forward_backward([scaled(datum, 1 / total) for datum in data], loss)


def test_a_step_normalised_call_by_call(parts: VerifySubject) -> None:
    assert failed(replace(parts, make_trainer=MeanOverTheCall)) == ("micro-batches change nothing",)


class SortedByLength(TorchBackend):
    """Sorts the data for packing and forgets the advantages."""

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]":
        ordered = sorted(data, key=lambda datum: -datum.num_tokens)
        mixed = [
            replace(
                datum,
                arrays={**datum.arrays, "advantages": np.resize(other.arrays["advantages"], datum.num_tokens)},
            )
            for datum, other in zip(ordered, data, strict=True)
        ]
        return super().forward_backward(mixed, loss)


def test_data_sorted_away_from_their_advantages(parts: VerifySubject) -> None:
    assert failed(replace(parts, make_trainer=SortedByLength)) == ("order changes nothing",)


class MeanOverTheLength(TorchBackend):
    """Counts the tokens after the last trained one, of which there are none without padding."""

    def forward_backward(self, data: Sequence[Datum], loss: LossSpec) -> "Future[ForwardOut]":
        ends = [int(np.flatnonzero(datum.arrays["weights"])[-1]) + 1 for datum in data]
        shares = [end / datum.num_tokens for end, datum in zip(ends, data, strict=True)]
        return super().forward_backward([scaled(d, share) for d, share in zip(data, shares, strict=True)], loss)


def test_padding_that_counts(parts: VerifySubject) -> None:
    assert failed(replace(parts, make_trainer=MeanOverTheLength)) == ("padding changes nothing",)


def scaled(datum: Datum, factor: float) -> Datum:
    weights = float_array(datum.arrays["weights"] * np.float64(factor))
    return replace(datum, arrays={**datum.arrays, "weights": weights})


def test_a_temperature_that_is_forgotten(parts: VerifySubject) -> None:
    def at_one(credited: Sequence[CreditedEpisode]) -> tuple[Datum, ...]:
        return tuple(replace(datum, temperature=1.0) for datum in to_data(credited))

    assert failed(replace(parts, to_data=at_one)) == ("the first step is on policy",)


class Imprecise(EmbeddedEngine):
    """Records log-probs that are off by as little as a rounding to half precision would be near -0.1."""

    async def sample(self, request: SampleRequest) -> Completion:
        done = await super().sample(request)
        return replace(done, sampler_logprobs=float_array(done.sampler_logprobs - 5e-5))


def test_a_sampler_that_records_other_logprobs(parts: VerifySubject) -> None:
    assert failed(replace(parts, make_engine=Imprecise)) == ("sampler and trainer agree",)


def uneven(module: nn.Module, inputs: tuple[Tensor], out: Tensor) -> Tensor:
    return out * (1 + 2.0**-22) if out.shape[1] > 8 else out


def test_a_machine_whose_sums_depend_on_the_batch() -> None:
    """In float64, where sampling runs through the model's own modules."""
    single = small()
    lm = prepare(single.model.double(), single.tokenizer, source="tests")
    lm.model.model.norm.register_forward_hook(uneven)
    parts = replace(wiring.verify_parts(lm), check_bits=check_bit_equality)
    assert failed(parts) == ("a crowd changes no bit",)


class OffByOne(Renderer):
    """Marks every token one too late."""

    def conversation(self, messages: Sequence[Message], **options: Any) -> tuple[Rendered, ...]:
        return tuple(
            Rendered(tokens=one.tokens, trained=np.roll(one.trained, 1))
            for one in super().conversation(messages, **options)
        )


def test_a_renderer_whose_mask_is_off_by_one(parts: VerifySubject) -> None:
    renderer = OffByOne(parts.lm.tokenizer, eos_tokens=parts.lm.eos_tokens)
    assert failed(replace(parts, renderer=renderer)) == ("masks cover what was sampled",)


def test_data_that_train_the_end_of_the_prompt(parts: VerifySubject) -> None:
    def wider(credited: Sequence[CreditedEpisode]) -> tuple[Datum, ...]:
        return tuple(replace(datum, arrays={**datum.arrays, "weights": widened(datum)}) for datum in to_data(credited))

    def widened(datum: Datum) -> Any:
        weights = datum.arrays["weights"].copy()
        weights[np.flatnonzero(weights)[0] - 1] = 1.0
        return float_array(weights)

    assert "masks cover what was sampled" in failed(replace(parts, to_data=wider))


def test_groups_mixed_by_the_order_of_their_end(parts: VerifySubject) -> None:
    def mixed(groups: Sequence[Group]) -> CreditedBatch:
        episodes = [scored for group in groups for scored in group.episodes]
        turned = episodes[1:] + episodes[:1]
        size = len(groups[0].episodes)
        cut = [turned[start : start + size] for start in range(0, len(turned), size)]
        return credit(
            [replace(group, episodes=tuple(part)) for group, part in zip(groups, cut, strict=True)], method="dr_grpo"
        )

    assert failed(replace(parts, credit=mixed)) == ("groups keep their identity",)


class Forgetful(TorchBackend):
    """Goes on from saved weights with a fresh optimiser."""

    def load_state(self, folder: Path) -> "Future[None]":
        super().load_state(folder).result()
        self._optimizer = make_optimizer(self.lm)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def test_an_optimiser_state_that_is_not_loaded(parts: VerifySubject) -> None:
    assert failed(replace(parts, make_trainer=Forgetful)) == ("a restart changes nothing",)


# --- what it says ----------------------------------------------------------------------------------------------------


class Unloadable(TorchBackend):
    def load_state(self, folder: Path) -> "Future[None]":
        raise BackendError("the disk is gone")


def test_a_proof_that_breaks_off_has_failed_and_says_why(parts: VerifySubject) -> None:
    proofs = list(verify(replace(parts, make_trainer=Unloadable)))
    (broken,) = [proof for proof in proofs if not proof.ok]
    assert broken.name == "a restart changes nothing"
    assert broken.detail == "the disk is gone"


def test_a_model_without_room_for_the_episodes_is_refused() -> None:
    with pytest.raises(ModelError, match="verify needs a context of 256 tokens and this model has 128"):
        next(verify(wiring.verify_parts(small(context=128))))


def test_the_command_prints_the_table_and_names_what_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = PropertyResult(
        name="gold glitters", figures=(Figure(label="carats", value=1e-7, bound=1e-4),), detail="a ring"
    )
    promised = Figure(label="weight", value=3.0, bound=float("inf"))
    bad = PropertyResult(
        name="lead floats", figures=(promised, Figure(label="depth", value=2.0, bound=0.0)), detail="a bath"
    )
    monkeypatch.setattr(wiring, "verify", lambda *, model, device: iter([good, bad]))
    monkeypatch.setattr(sys, "argv", ["headrace", "verify", "--device", "cpu"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 1
    captured = capsys.readouterr()
    lines = [line.split() for line in captured.out.splitlines()]
    assert lines[1:] == [
        ["gold", "glitters", "carats", "1.0e-07", "1.0e-04", "ok"],
        ["lead", "floats", "weight", "3", "none", "not", "promised"],
        ["depth", "2", "0", "FAILED"],
        ["a", "bath"],
    ]
    assert captured.err == "headrace: 1 of 2 properties do not hold: lead floats\n"


def test_a_computation_that_hangs_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(verify_command, "STALL_WARN_S", 0.1)

    def hang(parts: VerifySubject) -> Iterator[PropertyResult]:
        with watching("the trainer: forward_backward"):
            ends = time.monotonic() + 60
            while "no progress: the trainer" not in caplog.text and time.monotonic() < ends:
                time.sleep(0.01)
        yield from ()

    monkeypatch.setattr(verify_command, "prove", hang)
    with caplog.at_level(logging.WARNING, logger="headrace"):
        assert list(verify_command.verify(model=None, device="cpu")) == []
    assert "no progress: the trainer: forward_backward" in caplog.text


def test_a_check_whose_tasks_wait_for_each_other_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    during: list[tuple[str, ...]] = []

    def prove(parts: VerifySubject) -> Iterator[PropertyResult]:
        for number in range(2):
            during.append(open_activities())
            figure = Figure(label="y", value=0.0, bound=1.0)
            yield PropertyResult(name=str(number), figures=(figure,), detail="")

    monkeypatch.setattr(verify_command, "prove", prove)
    assert len(list(verify_command.verify(model=None, device="cpu"))) == 2
    assert all("checking a property" in what for what in during)
    assert "checking a property" not in open_activities()


def test_a_figure_that_is_no_number_is_not_within_its_bound() -> None:
    broken = PropertyResult(name="x", figures=(Figure(label="y", value=float("nan"), bound=float("inf")),), detail="z")
    assert failures([broken]) == ("x",)
    assert "FAILED" in rows(broken)


def test_errors_are_relative_to_what_is_expected() -> None:
    expected = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    # |(0, 1)| / |(3, 4)| = 1 / 5
    assert relative_error({"a": torch.tensor([3.0]), "b": torch.tensor([5.0])}, expected) == pytest.approx(0.2)
    assert relative_error({"a": torch.tensor([3.0])}, expected) == float("inf")
    assert relative_error(expected, {name: torch.zeros(1) for name in expected}) == float("inf")
    start = {name: torch.zeros(1) for name in expected}
    # resumed is 1 away from a way of 5
    assert relative_difference(start, expected, {"a": torch.tensor([3.0]), "b": torch.tensor([3.0])}) == pytest.approx(
        0.2
    )
    assert relative_difference(start, start, start) == float("inf")


def test_padding_has_no_weight_and_keeps_what_was_there() -> None:
    arrays = {"weights": float_array([0.0, 1.0]), "advantages": float_array([0.0, 2.0])}
    datum = Datum(
        inputs=int_array([1, 2]), targets=int_array([2, 3]), arrays={**arrays, "sampler_logprobs": float_array([0, -1])}
    )
    (longer,) = padded([datum])
    assert longer.num_tokens == 2 + 13
    assert list(trained_tokens(longer)) == list(trained_tokens(datum)) == [(int_array([1, 2]).tobytes(), 3, -1.0, 2.0)]
