"""Weights by broadcast over gloo, to a fake that receives them as our worker extension does in vLLM."""

import asyncio
import logging
import subprocess
import sys

import numpy as np
import pytest
import torch

from headrace.errors import SamplerError
from headrace.infer.servers.api import TransferGroup
from headrace.infer.servers.json_http import JsonHttp
from headrace.infer.servers.transfer.process_group import SendGroup, own_address
from headrace.infer.servers.transfer.sglang_routes import SglangTensorApi
from headrace.types import SampleRequest, SamplingParams, int_array
from support.fake_vllm import Faults
from support.server_samplers import Fleet, open_fleet


async def publish(fleet: Fleet, version: int) -> None:
    await fleet.sampler.pause(interrupt=True)
    await fleet.sampler.load(fleet.handle, version)
    await fleet.sampler.resume()


async def assert_sampled_by_trainer(fleet: Fleet, version: int) -> None:
    params = SamplingParams(max_tokens=20, stop_tokens=())
    completion = await fleet.sampler.sample(SampleRequest(prompt=int_array([3, 7, 4]), params=params))
    [wanted] = await fleet.trainer.score([int_array([3, 7, 4, *completion.tokens.tolist()])], 1.0)
    np.testing.assert_allclose(completion.sampler_logprobs, wanted[2:], atol=1e-4)
    assert completion.versions.tolist() == [version] * 20


async def test_every_server_gets_the_weights_of_every_version_in_buckets() -> None:
    async with open_fleet(2, broadcast=True) as fleet:
        for version in (1, 2):
            fleet.trainer.update()
            await publish(fleet, version)
            for server in fleet.servers:
                np.testing.assert_array_equal(server.embed, fleet.trainer.embed)
                np.testing.assert_array_equal(server.head, fleet.trainer.head)
            await assert_sampled_by_trainer(fleet, version)
        for server in fleet.servers:
            assert server.num_updates == 3 * 2, "both tensors are larger than a bucket"
            assert server.log.count("/init_weight_transfer_engine") == 1
            assert not any("collective_rpc" in path for path in server.log)


async def test_a_server_that_fails_while_it_receives_is_taken_out_and_repaired_with_the_version_it_missed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_fleet(2, broadcast=True) as fleet:
        fleet.servers[0].faults.fails_in_update = True
        fleet.trainer.update()
        with caplog.at_level(logging.WARNING):
            await publish(fleet, 1)
        assert "is taken out, 1 are left" in caplog.text
        assert "the worker failed" in caplog.text
        published = fleet.trainer.embed
        fleet.trainer.update()  # the trainer goes on
        fleet.servers[0].faults = Faults()
        async with asyncio.timeout(120):
            while len(fleet.sampler.usable) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        np.testing.assert_array_equal(fleet.servers[0].embed, published)
        await publish(fleet, 2)
        assert len(fleet.sampler.usable) == 2
        np.testing.assert_array_equal(fleet.servers[0].embed, fleet.trainer.embed)


async def test_a_server_without_the_extension_is_told_at_the_start() -> None:
    async with open_fleet(broadcast=True, start=False) as fleet:
        fleet.servers[0].faults.without_extension = True
        with pytest.raises(SamplerError, match=r"start it with our worker extension .*'engine\.sync' = \"folder\""):
            await fleet.sampler.start(fleet.handle)


def test_a_server_on_this_machine_is_met_at_the_loopback() -> None:
    assert own_address("http://127.0.0.1:8000") == "127.0.0.1"


# A worker as SGLang's are: torch makes the group, of a store that it finds by an address.
WORKER = """
import sys
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
address, name, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
store, rank, size = next(dist.rendezvous(address, 1, size, timeout=timedelta(seconds=240)))
group, _ = c10d._new_process_group_helper(
    size, rank, [], dist.Backend("gloo"), dist.PrefixStore(name, store), group_name=name,
    timeout=timedelta(seconds=240))
c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}
for dtype in (torch.float32, torch.bfloat16):
    tensor = torch.empty(5, dtype=dtype)
    dist.broadcast(tensor, src=0, group=group)
    print(tensor.float().tolist(), flush=True)
"""


class JoinsAProcess(SglangTensorApi):
    """Starts a worker where SGLang would ask its own to join."""

    process: "subprocess.Popen[str] | None" = None

    async def num_workers(self) -> int:
        return 1

    async def join_group(self, group: TransferGroup) -> None:
        command = [sys.executable, "-c", WORKER, f"tcp://{group.host}:{group.port}", group.name, str(group.num_ranks)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220


async def test_the_group_is_the_one_that_torch_makes_at_the_other_end() -> None:
    api = JoinsAProcess(JsonHttp("http://127.0.0.1:1"))
    group = await SendGroup.open(api, "http://127.0.0.1:1", device=torch.device("cpu"), join_s=240.0, timeout_s=240.0)
    tensor = torch.arange(5.0)
    await group.send([tensor, tensor.bfloat16()])
    assert api.process is not None
    out, _ = api.process.communicate(timeout=240)
    assert out.splitlines() == ["[0.0, 1.0, 2.0, 3.0, 4.0]"] * 2
    group.abandon()


async def test_workers_that_do_not_come_are_told_at_the_deadline() -> None:
    class Nobody(JoinsAProcess):
        async def join_group(self, group: TransferGroup) -> None:
            await asyncio.sleep(240)

    with pytest.raises(SamplerError, match=r"did not come about within 2 s|the process group failed"):
        await SendGroup.open(
            Nobody(JsonHttp("http://127.0.0.1:1")),
            "http://127.0.0.1:1",
            device=torch.device("cpu"),
            join_s=2.0,  # on a busy machine the own store takes more than 0.2 s
            timeout_s=2.0,
        )
