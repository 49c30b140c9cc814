"""The actor of an inference server, as an object of this process."""

import sys
from pathlib import Path

import pytest

from headrace.cluster import engine_replica
from headrace.cluster.engine_replica import EngineReplica
from headrace.errors import SamplerError
from headrace.infer.servers.launch import ServerOptions, vllm_command
from support.processes import alive, descendants

pytest.importorskip("ray")
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *words): pass
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


def options(model: Path) -> ServerOptions:
    return ServerOptions(python=sys.executable, model=model, context=64)


@pytest.fixture(autouse=True)
def small_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(options: ServerOptions, port: int) -> list[str]:
        return [options.python, "-I", "-c", SERVER, options.host, str(port)]

    monkeypatch.setattr(engine_replica, "COMMANDS", {"vllm": command})


async def test_a_server_listens_at_its_nodes_address_and_ends_with_its_actor(tmp_path: Path) -> None:
    from ray.util import get_node_ip_address

    replica = EngineReplica()
    url = await replica.start(
        "vllm", options(tmp_path), tmp_path / "log", 60.0, frozenset({get_node_ip_address(), "another"})
    )
    assert isinstance(url, str)
    assert url.startswith(f"http://{get_node_ip_address()}:")
    assert await replica.wait_ready() is None
    assert replica._server is not None
    assert replica._server.pid is not None
    below = [replica._server.pid, *descendants(replica._server.pid)]
    await replica.stop()
    assert not any(map(alive, below))


async def test_without_other_machines_only_this_one_reaches_it(tmp_path: Path) -> None:
    from ray.util import get_node_ip_address

    replica = EngineReplica()
    url = await replica.start("vllm", options(tmp_path), tmp_path / "log", 60.0, frozenset({get_node_ip_address()}))
    await replica.stop()
    assert isinstance(url, str)
    assert url.startswith("http://127.0.0.1:")


async def test_a_node_that_does_not_see_the_weights_says_so(tmp_path: Path) -> None:
    error = await EngineReplica().start("vllm", options(tmp_path / "weights"), tmp_path / "log", 60.0, frozenset({"c"}))
    assert isinstance(error, SamplerError)
    assert "write 'engine.sync_folder', a folder that all nodes share" in str(error)


def test_a_command_names_the_address_to_listen_at(tmp_path: Path) -> None:
    command = vllm_command(ServerOptions(python="p", model=tmp_path, context=64, host="10.0.0.7"), 8000)
    assert command[command.index("--host") + 1] == "10.0.0.7"
