"""Our losses against TRL 1.16's, driven through the loss methods of its own trainers on one batch.

TRL's methods are called on a stand-in that has the settings they read; the model is replaced by log-probs (or scores)
that require a gradient, so that losses and gradients are compared without a forward pass in between.
"""

import warnings
from collections import defaultdict
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.algo.loss_signature import loss_inputs
from headrace.algo.loss_weights import reweight
from headrace.algo.losses import find_loss
from headrace.types import Datum, float_array, int_array

pytestmark = pytest.mark.slow  # importing TRL takes up to ten seconds

B, L = 6, 9
MAX_COMPLETION = 16


@pytest.fixture(scope="module")
def trl() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("trl", minversion="1.16")


class Accelerator:
    """One process."""

    num_processes = 1
    device = torch.device("cpu")
    parallelism_config = None
    sync_gradients = True

    def gather(self, value: Tensor) -> Tensor:
        return value

    gather_for_metrics = gather

    def reduce(self, value: Tensor, reduction: str = "sum") -> Tensor:
        return value


def batch() -> dict[str, Tensor]:
    """Six completions of 4 to 9 tokens; ratios from 0.4 to 2.5, so that every clip is met on both sides."""
    generator = torch.Generator().manual_seed(7)
    policy_BL = -1.0 - torch.rand(B, L, generator=generator)
    lengths_B = torch.tensor([9, 4, 6, 9, 5, 7])
    return {
        "policy_logprobs": policy_BL,
        "sampler_logprobs": policy_BL + 0.4 * torch.randn(B, L, generator=generator),
        "reference_logprobs": policy_BL + 0.4 * torch.randn(B, L, generator=generator),
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.5, 0.9, -0.2])[:, None].expand(B, L),
        "weights": (torch.arange(L)[None] < lengths_B[:, None]).float(),
    }


def ours(
    name: str, arrays: dict[str, Tensor], *, weighting: str, output: str = "policy_logprobs", **numbers: float
) -> tuple[Tensor, Tensor]:
    """Loss and gradient, with the weights made for the step as a whole."""
    tokens = int_array([0] * L)
    data = [
        Datum(inputs=tokens, targets=tokens, arrays={"weights": float_array(row.numpy())}, unit=index % (B // 2))
        for index, row in enumerate(arrays["weights"])
    ]
    made = reweight(data, weighting=weighting, constant=MAX_COMPLETION)
    flat = {key: rows_BL.reshape(-1) for key, rows_BL in arrays.items()}
    flat["weights"] = torch.from_numpy(np.concatenate([datum.arrays["weights"] for datum in made]))
    flat["segments"] = torch.arange(B).repeat_interleave(L)
    fn = find_loss(name)
    inputs = loss_inputs(fn)
    names = (*inputs.required, *(["segments"] if inputs.wants_segments else []))
    leaf = flat[output].clone().requires_grad_()
    loss = fn(leaf, **{f"{key}_T": flat[key] for key in names}, **numbers).loss
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def check(mine: tuple[Tensor, Tensor], theirs: Tensor, leaf_BL: Tensor) -> None:
    theirs.backward()
    assert leaf_BL.grad is not None
    gradient = leaf_BL.grad.reshape(-1)
    assert mine[0].item() == pytest.approx(theirs.item(), rel=1e-5)
    assert torch.nn.functional.cosine_similarity(mine[1], gradient, dim=0).item() > 0.99999
    assert mine[1].norm().item() == pytest.approx(gradient.norm().item(), rel=1e-5)


def grpo_trainer(policy_BL: Tensor, **settings: Any) -> SimpleNamespace:
    args = SimpleNamespace(
        delta=settings.pop("delta", None),
        use_bias_correction_kl=settings.pop("use_bias_correction_kl", False),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        steps_per_generation=1,
    )
    trainer = SimpleNamespace(
        args=args,
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=0.0,
        loss_type="grpo",
        epsilon_low=0.2,
        epsilon_high=0.28,
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_COMPLETION,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy_BL, torch.zeros_like(policy_BL), None),
    )
    trainer.__dict__.update(settings)
    return trainer


def trl_inputs(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    mask_BL = arrays["weights"].long()
    return {
        "prompt_ids": torch.zeros(B, 2, dtype=torch.long),
        "prompt_mask": torch.ones(B, 2, dtype=torch.long),
        "completion_ids": torch.zeros(B, L, dtype=torch.long),
        "completion_mask": mask_BL,
        "advantages": arrays["advantages"][:, 0],
        "old_per_token_logps": arrays["sampler_logprobs"],
        "ref_per_token_logps": arrays["reference_logprobs"],
        "num_items_in_batch": mask_BL.sum(),
    }


CLIP = {"clip_low": 0.2, "clip_high": 0.28}


@pytest.mark.parametrize(
    ("settings", "name", "weighting", "numbers"),
    [
        ({"loss_type": "grpo"}, "ppo", "sequence_mean", CLIP),
        ({"loss_type": "grpo", "beta": 0.05}, "ppo + reference_kl_k3", "sequence_mean", {**CLIP, "kl_coef": 0.05}),
        (
            {"loss_type": "grpo", "beta": 0.05, "use_bias_correction_kl": True},
            "ppo + reference_kl_weighted",
            "sequence_mean",
            {**CLIP, "kl_coef": 0.05},
        ),
        ({"loss_type": "grpo", "delta": 1.5}, "ppo", "sequence_mean", {**CLIP, "dual_clip": 1.5}),
        ({"loss_type": "bnpo"}, "ppo", "token_mean", CLIP),
        ({"loss_type": "dapo"}, "ppo", "token_mean", CLIP),
        ({"loss_type": "dr_grpo"}, "ppo", "constant", CLIP),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.03, "epsilon_high": 0.04},
            "gspo",
            "sequence_mean",
            {"clip_low": 0.03, "clip_high": 0.04},
        ),
        ({"loss_type": "cispo", "epsilon_high": 1.3}, "cispo", "token_mean", {"ratio_high": 1.3}),
        ({"loss_type": "sapo"}, "sapo", "sequence_mean", {}),
    ],
    ids=lambda value: value["loss_type"] if isinstance(value, dict) and "loss_type" in value else None,
)
def test_grpo_family(
    trl: ModuleType, settings: dict[str, Any], name: str, weighting: str, numbers: dict[str, float]
) -> None:
    arrays = batch()
    policy_BL = arrays["policy_logprobs"].clone().requires_grad_()
    theirs = trl.GRPOTrainer._compute_loss(grpo_trainer(policy_BL, **settings), None, trl_inputs(arrays))
    check(ours(name, arrays, weighting=weighting, **numbers), theirs, policy_BL)


def test_rloo(trl: ModuleType) -> None:
    arrays = batch()
    policy_BL = arrays["policy_logprobs"].clone().requires_grad_()
    sampler_B = (arrays["sampler_logprobs"] * arrays["weights"]).sum(1)
    trainer = grpo_trainer(policy_BL)
    theirs = trl.RLOOTrainer._compute_loss(trainer, None, {**trl_inputs(arrays), "old_logps": sampler_B})
    check(ours("sequence_ppo", arrays, weighting="sequence_mean", **CLIP), theirs, policy_BL)


@pytest.mark.parametrize(("loss_type", "name"), [("sigmoid", "dpo"), ("ipo", "ipo")])
def test_dpo(trl: ModuleType, loss_type: str, name: str) -> None:
    # TRL lays out chosen rows, then rejected rows
    arrays = batch()
    sides = torch.tensor([1.0] * 3 + [-1.0] * 3)[:, None].expand(B, L)
    arrays |= {"preferences": sides, "units": torch.arange(3.0).repeat(2)[:, None].expand(B, L)}
    policy_BL = arrays["policy_logprobs"].clone().requires_grad_()
    mask_BL = arrays["weights"]
    rows = {"entropy": torch.zeros(B, L), "mean_logits": torch.zeros(B, L), "is_top1": torch.zeros(B, L).bool()}

    def model(**_: object) -> SimpleNamespace:
        return SimpleNamespace(log_probs=policy_BL * mask_BL, **rows)

    reference_B = (arrays["reference_logprobs"] * mask_BL).sum(1)
    trainer = SimpleNamespace(
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=0.3,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {
        "input_ids": torch.zeros(B, L + 1, dtype=torch.long),
        "attention_mask": torch.ones(B, L + 1, dtype=torch.long),
        "completion_mask": torch.cat([torch.zeros(B, 1), mask_BL], dim=1).long(),
        "ref_chosen_logps": reference_B[:3],
        "ref_rejected_logps": reference_B[3:],
    }
    theirs = trl.DPOTrainer._compute_loss(trainer, model, inputs, False)
    exactly(ours(name, arrays, weighting="unit_mean", beta=0.3), theirs, policy_BL)


def exactly(mine: tuple[Tensor, Tensor], theirs: Tensor, leaf: Tensor) -> None:
    """Assert that losses and every entry of the gradients agree to 1e-6."""
    theirs.backward()
    assert leaf.grad is not None
    assert mine[0].item() == pytest.approx(theirs.item(), abs=1e-6, rel=1e-6)
    torch.testing.assert_close(mine[1].reshape(leaf.shape), leaf.grad, atol=1e-6, rtol=1e-6)
    assert leaf.grad.abs().max() > 1e-3


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.3, 0.7)])
@pytest.mark.parametrize("shift", [0.5, -0.5])  # the KL is positive, or clamped to 0
def test_kto(trl: ModuleType, weights: tuple[float, float], shift: float) -> None:
    arrays = {name: rows_BL.double() for name, rows_BL in batch().items()}
    policy_BL, mask_BL = arrays["policy_logprobs"].clone().requires_grad_(), arrays["weights"]
    other_BL = -1.0 - torch.rand(B, L, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    reference_of_other_B = (other_BL * mask_BL).sum(1) - shift
    label_B = torch.tensor([True, False, True, True, False, False])

    def model(input_ids: Tensor, **_: object) -> SimpleNamespace:
        rows_BL = other_BL if bool((input_ids == 1).all()) else policy_BL
        zeros = torch.zeros(B, L)
        return SimpleNamespace(log_probs=rows_BL * mask_BL, entropy=zeros, mean_logits=zeros)

    trainer = SimpleNamespace(
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        precompute_ref_logps=True,
        calculate_KL=True,
        loss_type="kto",
        beta=0.3,
        desirable_weight=weights[0],
        undesirable_weight=weights[1],
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    trainer._compute_kl_logps = partial(trl.KTOTrainer._compute_kl_logps, trainer)
    completion_mask = torch.cat([torch.zeros(B, 1), mask_BL], dim=1).long()
    inputs = {
        "input_ids": torch.zeros(B, L + 1, dtype=torch.long),
        "attention_mask": torch.ones(B, L + 1, dtype=torch.long),
        "completion_mask": completion_mask,
        "KL_input_ids": torch.ones(B, L + 1, dtype=torch.long),
        "KL_attention_mask": torch.ones(B, L + 1, dtype=torch.long),
        "KL_completion_mask": completion_mask,
        "label": label_B,
        "ref_logps": (arrays["reference_logprobs"] * mask_BL).sum(1),
        "ref_KL_logps": reference_of_other_B,
    }
    theirs = trl.KTOTrainer._compute_loss(trainer, model, inputs, False)
    baseline = max(0.0, ((other_BL * mask_BL).sum(1) - reference_of_other_B).mean().item())
    arrays |= {
        "preferences": torch.where(label_B, 1.0, -1.0).double()[:, None].expand(B, L),
        "units": torch.arange(B).double()[:, None].expand(B, L),
        "baselines": torch.full((B, L), baseline, dtype=torch.float64),
    }
    numbers = {"beta": 0.3, "desirable_weight": weights[0], "undesirable_weight": weights[1]}
    exactly(ours("kto", arrays, weighting="seq_mean_token_sum", **numbers), theirs, policy_BL)


def paired_logits(prompt: int = 3, vocabulary: int = 11) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits of three pairs behind prompts of three tokens, and TRL's batch of them."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(B, prompt + L, vocabulary, generator=generator, dtype=torch.float64).requires_grad_()
    lengths_B = prompt + torch.tensor([9, 4, 6, 9, 5, 7])
    inside = torch.arange(prompt + L)[None] < lengths_B[:, None]
    ids = torch.randint(vocabulary, (B, prompt + L), generator=generator)
    labels = torch.where(inside & (torch.arange(prompt + L) >= prompt)[None], ids, -100)
    rows = {"input_ids": ids, "attention_mask": inside.long(), "labels": labels}
    sides = {"chosen": slice(0, 3), "rejected": slice(3, 6)}
    return logits, {f"{side}_{name}": value[where] for side, where in sides.items() for name, value in rows.items()}


def ours_of_logits(name: str, logits: Tensor, rows: dict[str, Tensor], **numbers: float) -> tuple[Tensor, Tensor]:
    """Loss and its gradient in the logits; every token but the first is a position."""

    def joined(field: str) -> Tensor:
        return torch.cat([rows[f"{side}_{field}"] for side in ("chosen", "rejected")])[:, 1:]

    leaf = logits.detach().clone().requires_grad_()
    picked = leaf.log_softmax(-1)[:, :-1].gather(-1, joined("input_ids")[..., None])[..., 0]
    chosen = (torch.arange(B) < 3)[:, None].expand_as(picked)
    imitated = (joined("attention_mask") == 1) & chosen
    arrays = {
        "preferences": torch.where(chosen, 1.0, -1.0),
        "units": (torch.arange(B) % 3)[:, None].expand_as(picked),
        "weights": (joined("labels") != -100) / 3,
        "nll_weights": imitated / imitated.sum(),
    }
    fn = find_loss(name)
    tensors = {f"{key}_T": arrays[key].double().reshape(-1) for key in loss_inputs(fn).required}
    loss = fn(picked.reshape(-1), **tensors, **numbers).loss
    loss.backward()
    assert leaf.grad is not None
    return loss.detach(), leaf.grad


def their_trainer(cls: Any, **settings: Any) -> SimpleNamespace:
    trainer = SimpleNamespace(
        accelerator=Accelerator(),
        is_encoder_decoder=False,
        aux_loss_enabled=False,
        padding_value=0,
        pad_token_id=0,
        concatenated_inputs=cls.concatenated_inputs,
        get_batch_logps=cls.get_batch_logps,
        **settings,
    )
    trainer.concatenated_forward = partial(cls.concatenated_forward, trainer)
    return trainer


def test_orpo(trl: ModuleType) -> None:
    cls = pytest.importorskip("trl.experimental.orpo").ORPOTrainer
    logits, rows = paired_logits()
    trainer = their_trainer(cls, beta=0.3)
    trainer.odds_ratio_loss = partial(cls.odds_ratio_loss, trainer)
    theirs, _ = cls.get_batch_loss_metrics(trainer, lambda *_, **__: SimpleNamespace(logits=logits), rows)
    exactly(ours_of_logits("orpo", logits, rows, beta=0.3), theirs, logits)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_simpo(trl: ModuleType, smoothing: float) -> None:
    cls = pytest.importorskip("trl.experimental.cpo").CPOTrainer
    logits, rows = paired_logits()
    trainer = their_trainer(
        cls, beta=1.5, simpo_gamma=0.4, label_smoothing=smoothing, loss_type="simpo", cpo_alpha=0.0, alpha=0.0
    )
    trainer.cpo_loss = partial(cls.cpo_loss, trainer)
    theirs, _ = cls.get_batch_loss_metrics(trainer, lambda *_, **__: SimpleNamespace(logits=logits), rows)
    mine = ours_of_logits("simpo", logits, rows, beta=1.5, gamma=0.4, label_smoothing=smoothing)
    exactly(mine, theirs, logits)


def test_reward_model(trl: ModuleType) -> None:
    # one score per sequence, at its last token
    scores_B = torch.tensor([0.3, -0.4, 1.2, 0.1, 0.5, -0.9], requires_grad=True)
    margin = torch.tensor([0.1, 0.0, 0.4])
    trainer = SimpleNamespace(
        args=SimpleNamespace(center_rewards_coefficient=0.02),
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"attention_mask": torch.ones(B, L), "margin": margin}
    theirs = trl.RewardTrainer.compute_loss(trainer, lambda **_: SimpleNamespace(logits=scores_B[:, None]), inputs)
    rows = {
        "scores": torch.zeros(B, L),
        "weights": torch.zeros(B, L),
        "preferences": torch.tensor([1.0] * 3 + [-1.0] * 3)[:, None].expand(B, L),
        "units": torch.arange(3.0).repeat(2)[:, None].expand(B, L),
    }
    rows["scores"][:, -1] = scores_B.detach()
    rows["weights"][:, -1] = 1.0
    fn = find_loss("bradley_terry")
    flat = {key: value_BL.reshape(-1) for key, value_BL in rows.items()}
    leaf = flat.pop("scores").clone().requires_grad_()
    margins_T = margin.repeat(2)[:, None].expand(B, L).reshape(-1)
    tensors = {f"{key}_T": row_T for key, row_T in flat.items()}
    loss = fn(leaf, **{**tensors, "weights_T": tensors["weights_T"] / 3}, margins_T=margins_T, center_coef=0.02).loss
    loss.backward()
    assert leaf.grad is not None
    check((loss.detach(), leaf.grad.reshape(B, L)[:, -1]), theirs, scores_B)


def test_sft(trl: ModuleType) -> None:
    arrays = batch()
    policy_BL = arrays["policy_logprobs"].clone().requires_grad_()
    mask_BL = arrays["weights"]
    rows = {"entropy": torch.zeros(B, L), "is_top1": torch.zeros(B, L).bool(), "label_mask": mask_BL.bool()}

    def model(**_: object) -> SimpleNamespace:
        return SimpleNamespace(log_probs=policy_BL * mask_BL, **rows)

    trainer = SimpleNamespace(
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=False, max_length=None),
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        aux_loss_enabled=False,
        compute_loss_func=None,
        label_smoother=None,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    inputs = {"labels": torch.zeros(B, L), "attention_mask": torch.ones(B, L)}
    theirs = trl.SFTTrainer.compute_loss(trainer, model, inputs)
    check(ours("cross_entropy", arrays, weighting="token_mean"), theirs, policy_BL)
