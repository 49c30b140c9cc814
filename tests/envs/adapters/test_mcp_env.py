"""MCP tool servers as a world: a real one made with the `mcp` package, and small ones that misbehave."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.config import absolute_paths, load_config
from headrace.envs import environment_tasks
from headrace.envs.adapters.mcp_client import McpClient, connect_server, start_server
from headrace.envs.adapters.mcp_env import SHARED, McpEnv
from headrace.envs.tool_env import read_action, write_call
from headrace.errors import ConfigError, EpisodeError
from headrace.types import Message, Observation, StepResult, Task
from support.mcp_server import mcp_server
from support.paths import FOREIGN

REAL = [sys.executable, str(FOREIGN / "server.py")]
QUESTIONS = str(FOREIGN / "questions.jsonl")

# The protocol by hand: answers the handshake with two tools and leaves the rest to the lines after it.
BARE = """
import json, os, sys, time
def reply(request, result): print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
def handshake():
    hello = json.loads(sys.stdin.readline())
    assert hello["method"] == "initialize" and hello["params"]["clientInfo"]["name"] == "headrace", hello
    known = {"capabilities": {"tools": {}}, "serverInfo": {"name": "bare", "version": "1"}}
    reply(hello, {"protocolVersion": "2025-06-18", **known})
    assert json.loads(sys.stdin.readline())["method"] == "notifications/initialized"
    page = json.loads(sys.stdin.readline())
    reply(page, {"tools": [{"name": "one", "inputSchema": {"type": "object"}}], "nextCursor": "more"})
    page = json.loads(sys.stdin.readline())
    assert page["params"] == {"cursor": "more"}, page
    reply(page, {"tools": [{"name": "two", "description": "second", "inputSchema": {"type": "object"}}]})
"""


REFUSES = """
hello = json.loads(sys.stdin.readline())
print(json.dumps({"jsonrpc": "2.0", "id": hello["id"], "error": {"code": 1, "message": "no seat"}}), flush=True)
sys.stdin.read()
"""


def bare(then: str) -> list[str]:
    return [sys.executable, "-S", "-c", BARE + "handshake()\n" + then]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[McpClient]]:
    monkeypatch.setattr("headrace.envs.adapters.mcp_client.END_GRACE_S", 0.5)
    servers: list[McpClient] = []
    yield servers
    for server in servers:
        server.close()


def open_server(opened: list[McpClient], then: str) -> McpClient:
    opened.append(start_server(bare(then)))
    return opened[-1]


def gone(pid: int) -> bool:
    """Whether a process has ended; a child that nobody has reaped yet counts as gone."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def all_gone(pids: list[int]) -> bool:
    """A kill takes a moment."""
    deadline = time.monotonic() + 100
    while not all(map(gone, pids)) and time.monotonic() < deadline:
        os.sched_yield()
    return all(map(gone, pids))


# --- the protocol, with servers by hand ------------------------------------------------------------------------------


def test_tools_are_listed_page_by_page(opened: list[McpClient]) -> None:
    server = open_server(opened, "sys.stdin.read()")
    assert [(tool.name, tool.description) for tool in server.tools] == [("one", ""), ("two", "second")]
    assert server.tools[1].schema == {"type": "object"}


def test_what_is_no_reply_is_passed_over_and_questions_of_the_server_are_answered(opened: list[McpClient]) -> None:
    server = open_server(
        opened,
        """
call = json.loads(sys.stdin.readline())
print("a stray print")
print("[1, 2]")
print(json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {}}))
print(json.dumps({"jsonrpc": "2.0", "id": 999, "result": {}}))
print(json.dumps({"jsonrpc": "2.0", "id": "p", "method": "ping"}), flush=True)
pong = json.loads(sys.stdin.readline())
sampling = {"messages": [], "maxTokens": 1}
print(json.dumps({"jsonrpc": "2.0", "id": "s", "method": "sampling/createMessage", "params": sampling}), flush=True)
refused = json.loads(sys.stdin.readline())
text = {"type": "text", "text": json.dumps([call["params"], pong, refused["error"]["message"]])}
reply(call, {"content": [text, {"type": "image", "data": "", "mimeType": "image/png"}]})
sys.stdin.read()
""",
    )
    text, image = server.call("one", {"é": [1]}, 20.0).split("\n")
    assert json.loads(text) == [
        {"name": "one", "arguments": {"é": [1]}},
        {"jsonrpc": "2.0", "id": "p", "result": {}},
        "Sampling not supported",
    ]
    assert image == "[image]"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ('"result": {"content": [{"type": "text", "text": "no"}], "isError": true}', "no"),
        ('"error": {"code": -32602, "message": "no such tool"}', "no such tool"),
        ('"result": {"content": [], "structuredContent": {"sum": 3}}', '{"sum": 3}'),
        ('"result": {"content": []}', ""),
    ],
)
def test_replies_of_every_kind(opened: list[McpClient], answer: str, text: str) -> None:
    server = open_server(
        opened,
        f"call = json.loads(sys.stdin.readline())\n"
        f"""print('{{"jsonrpc": "2.0", "id": %d, {answer}}}' % call["id"], flush=True)\n"""
        f"sys.stdin.read()",
    )
    assert server.call("one", {}, 20.0) == text


def test_a_server_that_ends_names_its_status_and_last_words(opened: list[McpClient]) -> None:
    server = open_server(
        opened, "sys.stdin.readline(); print('x' * 5000, 'out of\\nink', file=sys.stderr); os._exit(7)"
    )
    with pytest.raises(
        EpisodeError, match=r"ended with status 7 when the tool one was called; it said: x+ out of ink$"
    ):
        server.call("one", {}, 20.0)
    assert not server.alive
    with pytest.raises(EpisodeError, match="ended with status 7 when the tool two was called"):
        server.call("two", {}, 20.0)


def test_a_server_that_is_killed_is_named_with_its_signal(opened: list[McpClient]) -> None:
    server = open_server(opened, "sys.stdin.readline(); os.kill(os.getpid(), 9)")
    with pytest.raises(EpisodeError, match="was ended by signal 9"):
        server.call("one", {}, 20.0)


@pytest.mark.parametrize(
    ("then", "says"),
    [
        ("os.close(1); time.sleep(600)", "closed its stdout when the tool one was called"),
        ("sys.stdin.readline(); print('x' * 2000, flush=True); time.sleep(600)", "a message of more than 1000 bytes"),
        ("reply(json.loads(sys.stdin.readline()), {'content': 1})", "broke the protocol when the tool one was called"),
    ],
)
def test_a_server_that_cannot_answer_any_more_says_why(
    opened: list[McpClient], monkeypatch: pytest.MonkeyPatch, then: str, says: str
) -> None:
    monkeypatch.setattr("headrace.envs.adapters.mcp_client.MAX_LINE_BYTES", 1000)
    server = open_server(opened, then)
    with pytest.raises(EpisodeError, match=says):
        server.call("one", {}, 20.0)


def test_a_server_that_reads_no_more_says_so(opened: list[McpClient]) -> None:
    server = open_server(
        opened,
        "call = json.loads(sys.stdin.readline()); os.close(0); reply(call, {'content': []}); time.sleep(600)",
    )
    server.call("one", {}, 20.0)
    with pytest.raises(EpisodeError, match="does not read its stdin any more when the tool two was called"):
        server.call("two", {}, 20.0)


def test_a_call_has_a_deadline_and_a_late_reply_is_not_taken_for_another(opened: list[McpClient]) -> None:
    server = open_server(
        opened,
        """
first, second = json.loads(sys.stdin.readline()), json.loads(sys.stdin.readline())
reply(first, {"content": [{"type": "text", "text": "late"}]})
reply(second, {"content": [{"type": "text", "text": "in time"}]})
sys.stdin.read()
""",
    )
    with pytest.raises(EpisodeError, match=r"gave no answer within 0\.05 s when the tool one was called"):
        server.call("one", {}, 0.05)
    assert server.call("two", {}, 20.0) == "in time"


def test_a_server_that_does_not_read_cannot_hold_a_call_for_ever(opened: list[McpClient]) -> None:
    server = open_server(opened, "time.sleep(600)")
    with pytest.raises(EpisodeError, match=r"no answer within 0\.1 s"):
        server.call("one", {"big": "x" * 2**20}, 0.1)  # more than a pipe holds


def test_calls_of_several_threads_get_their_own_replies(opened: list[McpClient]) -> None:
    server = open_server(
        opened,
        """
calls = [json.loads(sys.stdin.readline()) for _ in range(8)]
for call in reversed(calls): reply(call, {"content": [{"type": "text", "text": str(call["params"]["arguments"]["n"])}]})
sys.stdin.read()
""",
    )
    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(lambda n: server.call("one", {"n": n}, 20.0), range(8)))
    assert replies == [str(n) for n in range(8)]


def test_closing_wakes_whoever_waits_and_kills_what_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.envs.adapters.mcp_client.END_GRACE_S", 0.1)
    server = start_server(
        bare(
            """
import signal, subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
call = json.loads(sys.stdin.readline())
reply(call, {"content": [{"type": "text", "text": f"{os.getpid()} {child.pid}"}]})
time.sleep(600)
"""
        )
    )
    pids = [int(pid) for pid in server.call("one", {}, 20.0).split()]
    said: list[str] = []

    def wait() -> None:
        with pytest.raises(EpisodeError) as caught:
            server.call("two", {}, 60.0)
        said.append(str(caught.value))

    waiting = threading.Thread(target=wait)
    waiting.start()
    server.close()
    waiting.join(20.0)
    server.close()
    assert len(said) == 1
    assert "was closed" in said[0]
    assert all_gone(pids)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["/no/such/program"], "cannot be started"),
        (
            [sys.executable, "-S", "-c", BARE + "reply(json.loads(sys.stdin.readline()), {})"],
            "failed with ValidationError: .*protocolVersion Field required",
        ),
        (
            [sys.executable, "-S", "-c", BARE + REFUSES],
            "refused: no seat when it was starting up",
        ),
        (["false"], "ended with status 1 when it was starting up"),
        (
            ["sh", "-c", "echo no licence >&2; exit 3"],
            "ended with status 3 when it was starting up; it said: no licence",
        ),
    ],
)
def test_a_server_that_cannot_be_started_says_why(command: list[str], says: str) -> None:
    with pytest.raises(EpisodeError, match=says):
        start_server(command, timeout_s=20.0)


def test_a_server_that_never_answers_is_not_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.envs.adapters.mcp_client.END_GRACE_S", 0.1)
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with pytest.raises(EpisodeError, match=r"no answer within 0\.1 s when it was starting up"):
        start_server(["sleep", "600"], timeout_s=0.1)
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before


# --- a real server ---------------------------------------------------------------------------------------------------


def real_task(**settings: Any) -> Task:
    return task_of(REAL, **settings)


def task_of(command: list[str], **settings: Any) -> Task:
    defaults = {"shared": False, "reward_tool": "", "state_tool": "", "call_timeout_s": 60.0, "max_turns": 4}
    return Task(
        id="t",
        messages=(Message(role="user", content="count"),),
        data={"answer": "3", "mcp": {"command": command, **defaults, **settings}},
    )


def said(result: StepResult) -> list[str]:
    return [message.content for message in result.observation.messages]


def act(env: McpEnv, shown: Observation, *calls: str) -> StepResult:
    text = calls[0] if len(calls) == 1 else json.dumps([json.loads(call) for call in calls])
    return env.call(read_action(text, shown.tools))


def test_a_server_is_played_with_its_own_state_and_judged_by_its_own_tool() -> None:
    env = McpEnv()
    first = env.reset(real_task(reward_tool="judge", state_tool="where"), seed=11)
    names = [tool["function"]["name"] for tool in first.tools]
    assert names == ["add", "count", "divide", "told", "process", "crash", "dawdle"], "not where and judge"
    assert first.tools[0]["function"]["description"] == "The sum of two whole numbers."
    assert first.tools[0]["function"]["parameters"]["required"] == ["a", "b"]
    counted = act(env, first, write_call("count", by=2), write_call("add", a=20, b=22))
    assert said(counted) == ["count 2", "42"]
    assert [message.role for message in counted.observation.messages] == ["tool", "tool"]
    assert len({message.tool_call_id for message in counted.observation.messages}) == 2
    assert (counted.valid, counted.done, counted.reward) == (True, False, 0.0)
    assert counted.observation.state != first.state
    wrong = act(env, first, write_call("count", by="two"), write_call("count"))
    assert not wrong.valid
    assert said(wrong) == [
        "the argument by must be of type integer",
        "not called, because another call of this turn is wrong",
    ]
    assert wrong.observation.state == counted.observation.state
    failed = act(env, first, write_call("divide", a=1, b=0))
    assert failed.valid
    assert "division" in said(failed)[0]
    ended = act(env, first, "2")
    assert (ended.done, ended.reward, ended.success) == (True, 1.0, True)
    env.close()


def test_every_episode_has_a_server_of_its_own_that_knows_the_seed_and_the_task() -> None:
    one, other = McpEnv(), McpEnv()
    first = one.reset(real_task(), seed=11)
    assert said(act(one, first, write_call("count"))) == ["count 1"]
    pids = [int(pid) for pid in said(act(one, first, write_call("process")))[0].split()]
    other.reset(real_task(max_turns=2), seed=12)
    assert said(act(other, first, write_call("count"))) == ["count 1"]
    last = act(other, first, write_call("told"))
    assert said(last) == ['12 {"answer": "3"}']
    assert (last.truncated, last.success) == (True, None)
    other.close()
    one.close()
    assert all_gone(pids), "neither the server nor its child is left"


@pytest.fixture
def url() -> Iterator[str]:
    """The URL of the real server, over HTTP."""
    with mcp_server() as address:
        yield address


def test_a_server_at_a_url_is_played_in_sessions_and_its_end_fails_the_episode(url: str) -> None:
    options = {"url": url, "tasks": QUESTIONS, "reward_tool": "judge", "state_tool": "where", "call_timeout_s": 5.0}
    tasks = environment_tasks("mcp", 2, 0, options)
    one, other = McpEnv(), McpEnv()
    shown = one.reset(tasks[0], seed=0)
    assert said(act(one, shown, write_call("count", by=2), write_call("add", a=20, b=22))) == ["count 2", "42"]
    failed = act(one, shown, write_call("divide", a=1, b=0))
    assert failed.valid
    assert "division" in said(failed)[0]
    ended = act(one, shown, "2")
    assert (ended.done, ended.reward, ended.success) == (True, 1.0, True)
    one.close()
    shown = other.reset(tasks[1], seed=0)
    with pytest.raises(EpisodeError, match=rf"the MCP server `{url}` .* when the tool crash was called"):
        other.call(read_action(write_call("crash"), shown.tools))
    with pytest.raises(EpisodeError, match=rf"the MCP server `{url}` failed with ConnectError"):
        other.call(read_action(write_call("count"), shown.tools))
    other.close()


def test_a_path_that_is_no_server_is_said(url: str) -> None:
    with pytest.raises(EpisodeError, match="knows no such path or session when it was starting up"):
        connect_server(f"{url}/elsewhere")


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"run  pip install 'mcp>=1.24,<2'"):
        start_server(["true"])


def test_a_crash_fails_the_episode_with_its_cause_and_a_shared_server_is_started_again() -> None:
    env = McpEnv()
    try:
        shown = env.reset(real_task(shared=True), seed=0)
        assert said(act(env, shown, write_call("count"))) == ["count 1"]
        env.close()
        env.reset(real_task(shared=True), seed=0)
        assert said(act(env, shown, write_call("count"))) == ["count 2"], "the same server"
        with pytest.raises(
            EpisodeError, match="ended with status 7 when the tool crash was called; it said: out of ink"
        ):
            act(env, shown, write_call("crash"))
        env.close()
        env.reset(real_task(shared=True), seed=0)
        assert said(act(env, shown, write_call("count"))) == ["count 1"], "a new one"
    finally:
        SHARED.close()


SAYS = """
call = json.loads(sys.stdin.readline())
reply(call, {"content": [{"type": "text", "text": %r}]})
sys.stdin.read()
"""


def test_what_is_no_call_costs_a_turn_and_the_judge_is_asked_at_the_limit() -> None:
    env = McpEnv()
    shown = env.reset(task_of(bare(SAYS % "0.5"), max_turns=1, reward_tool="two"), seed=0)
    result = act(env, shown, '{"name": "fly", "arguments": {}}')
    env.close()
    assert (result.valid, result.done, result.truncated, result.success) == (False, False, True, False)
    assert result.reward == 0.5
    assert "no call that can be made" in said(result)[0]


def test_a_judge_that_gives_no_number_fails_the_episode() -> None:
    env = McpEnv()
    shown = env.reset(task_of(bare(SAYS % "nothing"), reward_tool="two"), seed=0)
    with pytest.raises(EpisodeError, match="the reward tool two answered 'nothing', which is not a number"):
        act(env, shown, "done")
    env.close()


def test_without_a_judge_there_is_no_reward_and_no_verdict() -> None:
    env = McpEnv()
    shown = env.reset(task_of(bare("sys.stdin.read()")), seed=0)
    result = act(env, shown, "done")
    env.close()
    assert (result.done, result.reward, result.success, result.observation.messages) == (True, 0.0, None, ())


# --- tasks -----------------------------------------------------------------------------------------------------------


def quick(**options: Any) -> dict[str, Any]:
    return {"command": bare("sys.stdin.read()"), "tasks": QUESTIONS, **options}


def test_questions_are_split_and_ordered_by_their_seed() -> None:
    train = environment_tasks("mcp", 20, 0, quick(max_turns=3))
    again, other = (
        environment_tasks("mcp", 20, 0, quick(max_turns=3)),
        environment_tasks("mcp", 20, 1, quick(max_turns=3)),
    )
    held_out = environment_tasks("mcp", 10, 0, quick(max_turns=5, split="held_out"))
    assert train == again != other
    assert not {task.messages for task in train} & {task.messages for task in held_out}
    assert all(task.data["mcp"]["max_turns"] == 3 for task in train)
    numbers = [int(task.data["answer"]) for task in train]
    assert [task.messages[-1].content for task in train] == [
        f"What is {n // 2} + {n // 2 + 1}? Use the tools." for n in numbers
    ]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, r"needs the options command \(or url\) and tasks"),
        (quick(url="http://127.0.0.1:1/mcp"), "has both command and url: leave one of the two options out"),
        (
            quick(command=[], url="127.0.0.1/mcp"),
            "the option url of the environment mcp is '127.0.0.1/mcp': write http://",
        ),
        (
            quick(command=[], url="http://127.0.0.1:1/mcp"),
            r"the MCP server `http://127.0.0.1:1/mcp` failed with ConnectError: .* starting up: correct the option url",
        ),
        (quick(command=["no-such-program"]), "there is no program no-such-program"),
        (quick(command=["false"]), "ended with status 1 when it was starting up: try the command false by hand"),
        (quick(reward_tool="judge"), "has no tool judge: it has one, two"),
        (quick(state_tool="where"), "has no tool where"),
        (quick(split="all"), 'write "train" or "held_out"'),
    ],
)
def test_what_cannot_be_played_is_refused_with_a_reason(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        environment_tasks("mcp", 2, 0, options)


def test_more_tasks_than_there_are_questions_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"questions.jsonl has \d+ different tasks for split = 'train': set size to"):
        environment_tasks("mcp", 100, 0, quick())


def test_files_of_a_worlds_options_are_found_from_the_configuration(tmp_path: Path) -> None:
    for name in ("server.py", "questions.jsonl", "games.py", "python"):
        (tmp_path / name).write_text("")
    text = """
[rl]
steps = 1
tasks.type = "env"
tasks.name = "mcp"
tasks.options = { command = ["python", "server.py", "--port", "none.py"], tasks = "questions.jsonl", max_turns = 3 }
[eval]
source = { type = "env", name = "verifiers", options = { env = "games.py:load" } }
"""
    config = absolute_paths(load_config(text, file="run.toml"), base=tmp_path)
    assert config.rl is not None
    assert config.eval.source is not None
    assert config.rl.tasks[0].options == {
        "command": ["python", str(tmp_path / "server.py"), "--port", "none.py"],
        "tasks": str(tmp_path / "questions.jsonl"),
        "max_turns": 3,
    }
    assert config.eval.source.options == {"env": f"{tmp_path / 'games.py'}:load"}
