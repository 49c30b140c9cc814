"""A server's own checksums as proof: exact where they are of our bytes, by changes elsewhere, not with gaps."""

import hashlib
import logging
from functools import partial

import pytest
import torch

from headrace.errors import SamplerError
from headrace.infer.servers.checksums import HeldChecksums, digests_of, find_sources, missing_tensors
from support.server_samplers import Fleet, open_fleet

CHECKPOINT = {
    "model.embed_tokens.weight": torch.arange(6.0).reshape(3, 2),
    "model.layers.0.self_attn.q_proj.weight": torch.tensor([[1.0, 2.0]]),
    "model.layers.0.self_attn.k_proj.weight": torch.tensor([[3.0, 4.0]]),
    "model.layers.0.self_attn.v_proj.weight": torch.tensor([[5.0, 6.0]]),
    "lm_head.weight": torch.ones(3, 2, dtype=torch.bfloat16),
}
SERVED = [
    "dp0:pp0:pcp0:tp0:model.embed_tokens.weight",
    "dp0:pp0:pcp0:tp0:model.layers.0.self_attn.qkv_proj.weight",
    "dp0:pp0:pcp0:tp0:model.layers.0.rotary.cos_sin_cache",
]


def sha256(*tensors: torch.Tensor) -> str:
    return hashlib.sha256(b"".join(tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors)).hexdigest()


def test_fused_tensors_are_hashed_as_the_server_holds_them() -> None:
    sources = find_sources(SERVED, CHECKPOINT)
    assert missing_tensors(sources, CHECKPOINT) == [], "the head is tied to the embedding there"
    digests = digests_of({name: partial(torch.clone, tensor) for name, tensor in CHECKPOINT.items()}, sources)
    embed, query, key, value, _ = CHECKPOINT.values()
    assert digests == {SERVED[0]: sha256(embed), SERVED[1]: sha256(torch.cat([query, key, value]))}


def test_what_no_checksum_covers_is_named() -> None:
    sources = find_sources(SERVED[:1], CHECKPOINT)
    assert len(missing_tensors(sources, CHECKPOINT)) == 3


@pytest.mark.parametrize(
    ("found", "ours", "wrong"),
    [
        ({"a": "A2", "b": "own-2"}, {"a": "A2", "b": "B2"}, []),
        ({"a": "A1", "b": "own-2"}, {"a": "A2", "b": "B2"}, ["a"]),  # kept
        ({"a": "A3", "b": "own-2"}, {"a": "A2", "b": "B2"}, ["a"]),  # changed to something else
        ({"a": "A2", "b": "own-1"}, {"a": "A2", "b": "B2"}, ["b"]),  # kept, in a way of hashing that is not ours
        ({"a": "A1", "b": "own-2"}, {"a": "A1", "b": "B1"}, ["b"]),  # changed, and should not have
        ({"a": "A1"}, {"a": "A1", "b": "B1"}, ["b"]),
    ],
)
def test_digests_must_be_ours_or_change_when_ours_do(
    found: dict[str, str], ours: dict[str, str], wrong: list[str]
) -> None:
    held = HeldChecksums.first({"a": "A1", "b": "own-1"}, {"a": "A1", "b": "B1"})
    assert list(held.wrong_after(found, ours)) == wrong


async def publish(fleet: Fleet, version: int) -> None:
    await fleet.sampler.pause(interrupt=True)
    await fleet.sampler.load(fleet.handle, version)
    await fleet.sampler.resume()


def change_a_bit(fleet: Fleet) -> None:
    """Turn 0 into -0, which no log-prob shows, and back."""
    fleet.trainer.num_updates += 1
    head = fleet.trainer.head.copy()
    head[0, 0] = -0.0 if fleet.trainer.num_updates % 2 else 0.0
    fleet.trainer.head = head


@pytest.mark.parametrize("broadcast", [False, True])
async def test_checksums_find_what_log_probs_do_not_show(broadcast: bool) -> None:
    async with open_fleet(broadcast=broadcast) as fleet:
        change_a_bit(fleet)
        await publish(fleet, 1)
        fleet.servers[0].faults.keeps_head = True
        change_a_bit(fleet)
        with pytest.raises(SamplerError, match=r"no inference server is left.*checksums of 1 tensors .*tp0:head first"):
            await publish(fleet, 2)


async def test_log_probs_decide_where_checksums_do_not_see_every_tensor(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        async with open_fleet(start=False) as fleet:
            fleet.servers[0].faults.hides_head = True
            await fleet.sampler.start(fleet.handle)
            assert "leave out 1 of 2 tensors (head), so log-probs prove its weights" in caplog.text
            fleet.trainer.update()
            await publish(fleet, 1)
            assert fleet.servers[0].log.count("/weight_checker") == 1, "it is not asked again"
            fleet.servers[0].faults.keeps_head = True
            fleet.trainer.update()
            with pytest.raises(SamplerError, match="does not hold version 2: it differs from the trainer"):
                await publish(fleet, 2)
