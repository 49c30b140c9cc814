"""Serve the commands of the first rank in a process of its own, until its connection ends.

Run as `python -m headrace.train.fsdp.rank_process` by `ranks.start_rank`; under torchrun and Slurm `headrace train`
calls `serve_rank`. A thread reads the connection, so that a rank that waits in a collective still answers, and ends
when the first rank has.
"""

import json
import os
import queue
import signal
import sys
import threading
from functools import partial
from multiprocessing.connection import Client, Connection
from typing import Any

import torch
import torch.distributed as dist

from headrace.errors import RanksLostError, boundary
from headrace.model.load import no_progress_bars
from headrace.process.watchdog import EXIT_STALLED
from headrace.train.fsdp.launch import RankPlace, open_store
from headrace.train.fsdp.rank_backend import RankBackend, run_part
from headrace.train.fsdp.ranks import CHANNEL, SLACK_S, RankGroup, end_with_machine, join_group


def serve_rank(place: RankPlace, *, device: str, deadline_s: float) -> None:
    """Serve until the first rank says that it is over. The process ends with code 75 if ranks are lost.

    Signals that ask a run to stop are left to the first rank, which needs the others for its last checkpoint.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with boundary(RanksLostError, f"rank {place.rank} has not met the first rank within {deadline_s:g} s"):
        store = open_store(place, deadline_s=deadline_s)
        channel = json.loads(store.get(CHANNEL))
    connection = Client((channel["address"], channel["port"]), authkey=bytes.fromhex(channel["key"]))
    end_with_machine(connection)
    connection.send(place.rank)
    server = _Server(connection)
    threading.Thread(target=server.read, name="headrace-commands", daemon=True).start()
    group = join_group(
        store,
        rank=place.rank,
        num_ranks=place.num_ranks,
        local_rank=place.local_rank,
        device=device,
        timeout_s=deadline_s + SLACK_S,
    )
    with no_progress_bars():
        server.serve(group)
    group.saving.close(wait=True)
    dist.destroy_process_group()


class _Server:
    """Runs commands on the calling thread while another reads the connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._commands: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()

    def read(self) -> None:
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):  # the first rank has ended, or has found that a rank is lost
                os._exit(EXIT_STALLED)
            except (ImportError, AttributeError, TypeError, ValueError) as exc:
                self._send("broken", f"a command cannot be read: {exc}")
                os._exit(EXIT_STALLED)
            if message[0] == "ask":
                self._send("here")
            else:
                self._commands.put(message)
                if message[0] == "end":
                    return

    def _send(self, *message: Any) -> None:
        with self._sending:
            try:
                self._connection.send(message)
            except OSError:  # the first rank has ended
                os._exit(EXIT_STALLED)

    def serve(self, group: RankGroup) -> None:
        backends: dict[int, RankBackend] = {}
        while (message := self._commands.get())[0] != "end":
            _, number, backend, verb, arguments = message
            kind, result = run_part(partial(self._run, backends, backend, verb, arguments, group))
            if kind in ("memory", "broken"):
                self._send(kind, result)
                os._exit(EXIT_STALLED)
            self._send("reply", number, kind, result)

    def _run(
        self,
        backends: dict[int, RankBackend],
        backend: int,
        verb: str,
        arguments: tuple[Any, ...],
        group: RankGroup,
    ) -> Any:
        if verb == "open":
            build, options = arguments
            backends[backend] = RankBackend(build(), options, group.mesh, group.saving, progress=self._progress)
            return None
        if verb == "close":
            if (closed := backends.pop(backend, None)) is not None:
                closed.finish_saving()
            return None
        return getattr(backends[backend], verb)(*arguments)

    def _progress(self, what: str) -> None:
        self._send("doing", what)


if __name__ == "__main__":
    start = json.loads(sys.stdin.read())
    torch.set_num_threads(start["threads"])
    serve_rank(RankPlace(**start["place"]), device=start["device"], deadline_s=start["deadline_s"])
