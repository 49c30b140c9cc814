"""The program of an engine process: answer the calls that come over a socket, until its other end is gone.

    python -m headrace.infer.engine_processes.host_process DESCRIPTOR THREADS FOLDER

DESCRIPTOR is that of the inherited socket. FOLDER, with the run's weights, is removed if the other end goes without
saying "close": its owner was killed.
"""

import asyncio
import logging
import os
import shutil
import socket
import sys
from typing import Any

import torch

from headrace.errors import HeadraceError, SamplerError, boundary
from headrace.infer.engine_processes.engine_host import EngineHost
from headrace.infer.engine_processes.messages import CancelCall, HostCall, HostReply, frame, receive

logger = logging.getLogger(__name__)


async def serve(host: EngineHost, connection: socket.socket) -> bool:
    """Answer calls, many at once; return whether the other end has said "close" before it went."""
    reader, writer = await asyncio.open_connection(sock=connection)
    tasks: dict[int, asyncio.Task[None]] = {}
    closed = False

    async def answer(call: HostCall) -> None:
        reply = await _run(host, call)
        tasks.pop(call.id, None)
        writer.write(frame(reply))

    while (message := await receive(reader)) is not None:
        if isinstance(message, CancelCall):
            if message.id in tasks:
                tasks.pop(message.id).cancel()
            continue
        closed = closed or message.verb == "close"
        tasks[message.id] = asyncio.create_task(answer(message))
    return closed


async def _run(host: EngineHost, call: HostCall) -> HostReply:
    try:
        with boundary(SamplerError, f"the engine could not {call.verb}"):
            value: Any = await getattr(host, call.verb)(*call.arguments, **dict(call.named))
            return HostReply(id=call.id, value=value)
    except HeadraceError as exc:
        return HostReply(id=call.id, error=exc)


def main(arguments: list[str]) -> None:
    """Serve until the socket closes, then end at once, whatever is being computed."""
    descriptor, threads, folder = arguments
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(int(threads))
    closed = asyncio.run(serve(EngineHost(), socket.socket(fileno=int(descriptor))))
    if not closed:
        shutil.rmtree(folder, ignore_errors=True)
    logging.shutdown()
    os._exit(0)  # a compute thread may be in the middle of a step


if __name__ == "__main__":
    main(sys.argv[1:])
