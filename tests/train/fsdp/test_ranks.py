"""A rank that ends, hangs or has no memory left ends all ranks, with one sentence; nothing is left over."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import ConfigError, RanksLostError
from headrace.train.fsdp import checkpoints
from headrace.train.fsdp.backend import FsdpBackend
from headrace.train.fsdp.launch import RankPlace, first_node, place_from_environment
from headrace.train.fsdp.rank_backend import BackendOptions
from headrace.train.fsdp.ranks import LOST_S, Ranks, end_with_machine
from headrace.types import CROSS_ENTROPY, Datum, LossSpec, float_array, int_array
from support.fsdp import build_model, close_ranks

LIMIT_S = 240  # the machine may be busy


def datum(length: int) -> Datum:
    tokens = int_array(range(2, 3 + length))
    return Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={"weights": float_array([0.5] * length)})


DATA = [datum(6), datum(5)]  # one for each rank


@pytest.fixture
def opened() -> Iterator[tuple[Ranks, FsdpBackend]]:
    close_ranks()
    ranks = Ranks(2, deadline_s=LIMIT_S)
    backend = FsdpBackend(ranks, partial(build_model), BackendOptions())
    yield ranks, backend
    backend.close()
    ranks.close()
    assert all(process.poll() is not None for process in ranks._processes.values())


def other(ranks: Ranks) -> "subprocess.Popen[str]":
    return ranks._processes[1]


def out_of_memory(policy_logprobs_T: Any, weights_T: Any) -> Any:
    """Fails on the rank that has the shorter datum, the second."""
    from headrace.algo.losses import LOSSES

    if len(weights_T) == 5:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
    return LOSSES["cross_entropy"](policy_logprobs_T, weights_T)


def out_of_memory_here(policy_logprobs_T: Any, weights_T: Any) -> Any:
    """Fails on the rank that has the longer datum, the first."""
    from headrace.algo.losses import LOSSES

    if len(weights_T) == 6:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB")
    return LOSSES["cross_entropy"](policy_logprobs_T, weights_T)


def ends_itself(policy_logprobs_T: Any, weights_T: Any) -> Any:
    if len(weights_T) == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    from headrace.algo.losses import LOSSES

    return LOSSES["cross_entropy"](policy_logprobs_T, weights_T)


def stops_itself(policy_logprobs_T: Any, weights_T: Any) -> Any:
    if len(weights_T) == 5:
        os.kill(os.getpid(), signal.SIGSTOP)
    from headrace.algo.losses import LOSSES

    return LOSSES["cross_entropy"](policy_logprobs_T, weights_T)


def sleeps(policy_logprobs_T: Any, weights_T: Any) -> Any:
    if len(weights_T) == 5:
        time.sleep(LIMIT_S)
    from headrace.algo.losses import LOSSES

    return LOSSES["cross_entropy"](policy_logprobs_T, weights_T)


@pytest.mark.slow
def test_a_rank_that_is_killed_in_a_step_fails_all_requests_with_its_name(opened: tuple[Ranks, FsdpBackend]) -> None:
    _, backend = opened
    failed = backend.forward_backward(DATA, LossSpec(fn=ends_itself))
    behind = backend.forward(DATA, CROSS_ENTROPY)
    for future in (failed, behind):
        error = future.exception(LIMIT_S)
        assert isinstance(error, RanksLostError)
        assert "rank 1 was killed (SIGKILL)" in str(error)
        assert "during forward_backward (micro-batch 1 of 1)" in str(error)
        assert "all 2 ranks end" in str(error)
    with pytest.raises(RanksLostError, match="rank 1"):
        backend.forward(DATA, CROSS_ENTROPY).result(LIMIT_S)


@pytest.mark.slow
def test_a_rank_that_is_killed_between_two_steps_is_noticed(opened: tuple[Ranks, FsdpBackend]) -> None:
    ranks, backend = opened
    assert backend.forward(DATA, CROSS_ENTROPY).result(LIMIT_S).loss > 0
    other(ranks).kill()
    other(ranks).wait()
    with pytest.raises(RanksLostError, match=r"rank 1 was killed \(SIGKILL\)"):
        backend.forward(DATA, CROSS_ENTROPY).result(LIMIT_S)


@pytest.mark.slow
def test_a_rank_that_is_killed_while_a_state_is_written_is_named(
    opened: tuple[Ranks, FsdpBackend], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, backend = opened
    may_write = threading.Event()
    monkeypatch.setattr(checkpoints.ModelFolder, "add", lambda *arguments: may_write.wait(LIMIT_S))
    saving = backend.save_state(tmp_path)
    assert backend.forward(DATA, CROSS_ENTROPY).result(LIMIT_S).loss > 0  # the state is copied
    other(ranks).kill()
    error = saving.exception(LIMIT_S)
    may_write.set()
    assert isinstance(error, RanksLostError)
    assert "rank 1 was killed (SIGKILL)" in str(error)
    assert not (tmp_path / "trainer.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "rank"), [(out_of_memory, 1), (out_of_memory_here, 0)])
def test_a_rank_without_memory_says_so(opened: tuple[Ranks, FsdpBackend], loss: Any, rank: int) -> None:
    _, backend = opened
    error = backend.forward_backward(DATA, LossSpec(fn=loss)).exception(LIMIT_S)
    assert isinstance(error, RanksLostError)
    assert f"rank {rank} ran out of memory during forward_backward" in str(error)
    assert "3.00 GiB" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "says"),
    [(stops_itself, "rank 1 does not answer during forward_backward"), (sleeps, "nothing moves in forward_backward")],
)
def test_a_rank_that_hangs_ends_the_run_at_the_deadline(loss: Any, says: str) -> None:
    close_ranks()
    ranks = Ranks(2, deadline_s=LIMIT_S)
    backend = FsdpBackend(ranks, partial(build_model), BackendOptions())
    backend.forward(DATA, CROSS_ENTROPY).result(LIMIT_S)
    ranks._deadline_s = 5.0
    began = time.monotonic()
    error = backend.forward_backward(DATA, LossSpec(fn=loss)).exception(LIMIT_S)
    assert isinstance(error, RanksLostError)
    assert says in str(error)
    assert "the deadline of 5 s has passed" in str(error)
    assert time.monotonic() - began < LIMIT_S / 2
    backend.close()
    ranks.close()
    assert ranks._processes[1].poll() is not None


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="the system's timers are read from /proc")
def test_both_ends_of_a_connection_ask_whether_a_silent_machine_is_there(opened: tuple[Ranks, FsdpBackend]) -> None:
    (ours,) = opened[0]._connections.values()
    with socket.socket(fileno=os.dup(ours.fileno())) as channel:
        ends = {channel.getsockname()[1], channel.getpeername()[1]}

    def asking() -> set[int]:
        """Return the ends whose timer is that of a silent connection."""
        lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        joined = [line for line in lines if {int(line[i].rpartition(":")[2], 16) for i in (1, 2)} == ends]
        return {int(line[1].rpartition(":")[2], 16) for line in joined if line[5].startswith("02:")}

    deadline = time.monotonic() + LIMIT_S
    while asking() != ends and time.monotonic() < deadline:  # what was sent last is confirmed soon
        time.sleep(0.05)
    assert asking() == ends


def test_the_time_of_a_lost_machine_is_that_which_is_stated() -> None:
    with Listener(("127.0.0.1", 0)) as listener, Client(listener.address) as connection:
        end_with_machine(connection)
        with socket.socket(fileno=os.dup(connection.fileno())) as channel:
            idle, every, times, unconfirmed_ms = (
                channel.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"))
                for name in ("KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT")
            )
    assert idle + times * every == unconfirmed_ms / 1000 == LOST_S == 120


def test_ranks_end_with_the_first_one(tmp_path: Any) -> None:
    """Also when it is killed, and cannot say goodbye."""
    script = (
        "import os, signal, sys; from headrace.train.fsdp.ranks import Ranks; ranks = Ranks(2, deadline_s=100); "
        "print(ranks._processes[1].pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    first = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
    pid = int(first.stdout)
    end = time.monotonic() + LIMIT_S
    while _is_running(pid):
        assert time.monotonic() < end, "the rank lives on"
        time.sleep(0.1)


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- launchers -------------------------------------------------------------------------------------------------------

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29400"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_NODELIST": "gpu[003-004,7]",
}


def test_the_place_of_a_rank_is_read_from_its_launcher() -> None:
    assert place_from_environment({}) is None
    assert place_from_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}) is None  # a batch script without srun
    place = RankPlace(rank=3, num_ranks=4, local_rank=1, address="node1", port=29400)
    assert place_from_environment(TORCHRUN) == place
    restarted = place_from_environment(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"})
    assert restarted is not None
    assert restarted.attempt == 2
    assert place_from_environment(SRUN) == RankPlace(
        rank=9, num_ranks=16, local_rank=1, address="gpu003", port=20_000 + 4567
    )
    assert place_from_environment(TORCHRUN | SRUN) == place


def test_variables_of_a_launcher_that_are_wrong_are_named() -> None:
    with pytest.raises(ConfigError, match="three"):
        place_from_environment(TORCHRUN | {"RANK": "three"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("a1", "a1"), ("a[03-07,9],b1", "a03"), ("n-[1,5]-ib,z", "n-1-ib"), ("x,y", "x"), ("r1c[2-3]", "r1c2")],
)
def test_the_first_machine_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first
