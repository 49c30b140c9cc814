"""Servers that free their memory for a trainer: the routes, their order, and what happens when a server does not."""

from typing import Any

import pytest

from headrace.errors import SamplerError
from headrace.infer.servers.colocation import SglangMemory, VllmMemory, sleep_arguments
from support.fake_vllm import Faults, fake_vllm


@pytest.mark.parametrize(("keep_weights", "level"), [(True, 1), (False, 2)])
async def test_vllm_sleeps_and_wakes_weights_first(keep_weights: bool, level: int) -> None:
    with fake_vllm() as (url, state):
        memory = VllmMemory(url)
        await memory.sleep(keep_weights=keep_weights)
        await memory.sleep(keep_weights=keep_weights)
        assert state.asleep == {"weights", "kv_cache"}
        await memory.wake()
        assert not state.asleep
        await memory.wake()
        sent = [route for route in state.log if route != "/is_sleeping"]
        assert sent == [f"/sleep?level={level}&mode=abort", "/wake_up?tags=weights", "/wake_up?tags=kv_cache"]


async def test_a_server_that_was_started_again_is_not_woken() -> None:
    with fake_vllm() as (url, state):
        memory = VllmMemory(url)
        await memory.sleep(keep_weights=True)
        state.asleep, _ = set(), state.resumed.set()
        await memory.wake()
        assert not [route for route in state.log if route.startswith("/wake_up")]
        await memory.sleep(keep_weights=True)
        assert state.asleep


async def test_a_server_that_only_says_that_it_sleeps_is_found() -> None:
    with fake_vllm(faults=Faults(never_sleeps=True)) as (url, _):
        with pytest.raises(SamplerError, match="--enable-sleep-mode"):
            await VllmMemory(url).sleep(keep_weights=True)


class Recorded:
    """Takes requests in place of a server."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Any]] = []

    async def post(self, path: str, body: Any = None, *, deadline_s: float) -> Any:
        self.sent.append((path, body))
        return None


@pytest.mark.parametrize("keep_weights", [True, False])
async def test_sglang_releases_and_resumes_by_tags(keep_weights: bool) -> None:
    memory, http = SglangMemory("http://sglang"), Recorded()
    memory._http = http  # type: ignore[assignment]
    await memory.wake()
    await memory.sleep(keep_weights=keep_weights)
    await memory.sleep(keep_weights=keep_weights)
    await memory.wake()
    await memory.wake()
    release, resume = "/release_memory_occupation", "/resume_memory_occupation"
    if keep_weights:  # it has no copy of them elsewhere
        assert http.sent == [(release, {"tags": ["kv_cache"]}), (resume, {"tags": ["kv_cache"]})]
    else:
        assert http.sent == [
            (release, {"tags": ["kv_cache", "weights"]}),
            (resume, {"tags": ["weights"]}),
            (resume, {"tags": ["kv_cache"]}),
        ]
    http.sent.clear()
    await memory.sleep(keep_weights=keep_weights)
    memory.was_started_again()
    http.sent.clear()
    await memory.wake()
    assert not http.sent


def test_servers_are_started_so_that_they_can_sleep() -> None:
    assert sleep_arguments("vllm", 0.611) == ("--enable-sleep-mode", "--gpu-memory-utilization", "0.61")
    assert sleep_arguments("sglang", 0.5) == ("--enable-memory-saver", "--mem-fraction-static", "0.50")
