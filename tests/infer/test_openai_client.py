"""A remote model as a policy: over real HTTP, against our own endpoint and against a server that answers plainly."""

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from headrace.cli import app
from headrace.data.conversations import ToolConversation, load_conversations
from headrace.data.demonstrations import EpisodeSelection, demonstration, record_tools, write_demonstrations
from headrace.data.rows import DataSource
from headrace.envs import environment_tasks
from headrace.envs.calculator import CalculatorEnv
from headrace.errors import ConfigError, DataError, SamplerError
from headrace.infer import openai_client
from headrace.infer.openai_api import serve
from headrace.infer.openai_client import EndpointConfig, RemoteModel
from headrace.rollout.group import RemoteGroupPlayer, start_hash
from headrace.testing import FakeEnv, FakeRewardRunner, FakeToolEnv, run_virtual
from headrace.types import EndReason, Group, Message, SamplingParams, StopReason, Task
from support.agent_programs import ADD, scripted

SAMPLING = SamplingParams(max_tokens=100)
HELLO = (Message(role="user", content="hello"),)
SUM = Task(id="sum", data={"question": "( 12 + 7 ) * 3", "max_turns": 6, "tools": True})
CALLS = (
    '<tool_call>\n{"name": "calculate", "arguments": {"left": 12, "operator": "+", "right": 7}}\n</tool_call>',
    '<tool_call>\n{"name": "calculate", "arguments": {"left": 19, "operator": "*", "right": 3}}\n</tool_call>',
    '{"name": "answer", "arguments": {"number": 57}}',
)


def completion(content: str | None, *calls: tuple[str, str], finish: str = "stop") -> dict[str, Any]:
    """A chat completion with the fields that OpenAI's servers send."""
    made = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content, "refusal": None, "annotations": []}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m-2026",
        "choices": [
            {
                "index": 0,
                "message": {**message, **({"tool_calls": made} if made else {})},
                "logprobs": None,
                "finish_reason": "tool_calls" if made else finish,
            }
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7},
    }


Answer = tuple[int, dict[str, str], dict[str, Any] | str]


class Server:
    """A plain server on a real socket; it answers in turn and keeps what it was asked."""

    def __init__(self, answers: Sequence[Answer]) -> None:
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                server.asked.append(json.loads(body))
                server.headers.append({**{k.lower(): v for k, v in self.headers.items()}, "path": self.path})
                status, headers, answer = answers[min(len(server.asked), len(answers)) - 1]
                content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> "Server":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def ok(content: str | None, *calls: tuple[str, str], finish: str = "stop") -> Answer:
    return 200, {}, completion(content, *calls, finish=finish)


@contextlib.asynccontextmanager
async def model_at(url: str, sampling: SamplingParams = SAMPLING, **endpoint: Any) -> AsyncIterator[RemoteModel]:
    pauses = endpoint.pop("pauses", [])

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        await asyncio.sleep(0)

    model = RemoteModel("m", EndpointConfig(url=url, **endpoint), sampling, pause=pause)
    try:
        yield model
    finally:
        await model.close()


# --- one reply -------------------------------------------------------------------------------------------------------


async def test_a_conversation_with_calls_goes_over_the_wire_and_a_message_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    sampling = SamplingParams(max_tokens=100, temperature=0.5, top_p=0.9, stop_strings=("END",))
    with Server([ok(None, ("add", '{"a": 1, "b": 2}')), ok("3", finish="length")]) as server:
        async with model_at(server.url + "/", sampling, api_key_env="MY_KEY") as model:
            said, stop = await model.reply(HELLO, (ADD,))
            assert (said.content, said.tool_calls[0].name, stop) == ("", "add", StopReason.STOP)
            result = Message(role="tool", content="3", name="add", tool_call_id="call_0")
            said, stop = await model.reply((*HELLO, said, result), ())
    assert (said, stop) == (Message(role="assistant", content="3"), StopReason.LENGTH)
    assert [headers["path"] for headers in server.headers] == ["/v1/chat/completions"] * 2
    assert server.headers[0]["authorization"] == "Bearer secret"
    assert server.asked[0] == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_completion_tokens": 100,
        "temperature": 0.5,
        "top_p": 0.9,
        "stop": ["END"],
        "tools": [ADD],
    }
    call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    assert server.asked[1]["messages"][1:] == [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "call_0"},
    ]
    assert "tools" not in server.asked[1]


async def test_parts_and_arguments_that_are_objects_are_read_as_well() -> None:
    body: dict[str, Any] = completion(None, ("add", "{}"))
    message = body["choices"][0]["message"]
    message["content"] = [
        {"type": "thinking", "thinking": []},
        {"type": "text", "text": "so "},
        {"type": "text", "text": "3"},
    ]
    message["tool_calls"][0]["function"]["arguments"] = {"a": 1, "b": [2]}
    with Server([(200, {}, body)]) as server:
        async with model_at(server.url) as model:
            said, _ = await model.reply(HELLO, (ADD,))
    assert said.content == "so 3"
    assert said.tool_calls[0].arguments == '{"a": 1, "b": [2]}'


async def test_what_the_api_does_by_itself_is_not_asked_for() -> None:
    with Server([ok("hi")]) as server:
        async with model_at(server.url) as model:
            await model.reply(HELLO, ())
    assert server.asked[0].keys() == {"model", "messages", "max_completion_tokens"}
    assert "authorization" not in server.headers[0]


async def test_attempts_that_may_succeed_later_are_made_again_with_growing_pauses() -> None:
    busy: Answer = (429, {"retry-after": "7"}, {"error": {"message": "slow down"}})
    answers = [busy, (503, {}, "over"), (500, {}, "oh"), ok("hi")]
    pauses: list[float] = []
    with Server(answers) as server:
        async with model_at(server.url, pauses=pauses) as model:
            said, _ = await model.reply(HELLO, ())
    assert (said.content, len(server.asked)) == ("hi", 4)
    assert pauses == [7.0, 1.0, 2.0]  # as the server asked; then twice as long each time


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            (400, {}, {"error": {"message": "no such model", "param": "model"}}),
            "refused a request, status 400: no such",
        ),
        ((500, {"x-should-retry": "false"}, {"error": {"message": "broken"}}), "refused a request, status 500: broken"),
        ((200, {}, "<html>"), "the reply of m is not JSON"),
        ((200, {}, {"choices": []}), "the reply of m is not a chat completion"),
    ],
)
async def test_what_cannot_be_mended_by_trying_again_is_told_at_once(answer: Answer, told: str) -> None:
    with Server([answer]) as server:
        async with model_at(server.url) as model:
            with pytest.raises(SamplerError, match=told):
                await model.reply(HELLO, ())
    assert len(server.asked) == 1


def test_a_server_that_is_not_there_is_tried_until_the_deadline() -> None:
    attempts = 0

    def refuse(request: httpx.Request) -> httpx.Response:
        nonlocal attempts
        attempts += 1
        raise httpx.ConnectError("nobody listens")

    async def ask() -> None:
        endpoint = EndpointConfig(url="http://x/v1", deadline_s=60.0)
        model = RemoteModel("m", endpoint, SAMPLING, transport=httpx.MockTransport(refuse))
        with pytest.raises(SamplerError, match=r"gave no reply within 60 s; the last attempt: ConnectError: nobody"):
            await model.reply(HELLO, ())
        await model.close()

    run_virtual(ask())
    assert attempts == 8  # after 0, 0.5, 1.5, 3.5, 7.5, 15.5, 31.5 and 51.5 s


async def test_a_real_port_on_which_nobody_listens_is_tried_again() -> None:
    pauses: list[float] = []
    tired = asyncio.Event()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            tired.set()

    with Server([ok("hi")]) as server:
        url = server.url
    model = RemoteModel("m", EndpointConfig(url=url), SAMPLING, pause=pause)
    asking = asyncio.ensure_future(model.reply(HELLO, ()))
    await tired.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await model.close()
    assert pauses[:3] == [0.5, 1.0, 2.0]


async def test_so_many_requests_are_open_together_and_no_more() -> None:
    open_now, most = 0, 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        for _ in range(5):
            await asyncio.sleep(0)
        open_now -= 1
        return httpx.Response(200, json=completion("hi"))

    model = RemoteModel(
        "m", EndpointConfig(url="http://x/v1", at_once=3), SAMPLING, transport=httpx.MockTransport(answer)
    )
    await asyncio.gather(*(model.reply(HELLO, ()) for _ in range(10)))
    await model.close()
    assert most == 3


async def test_a_reply_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "MAX_REPLY_BYTES", 1000)
    with Server([ok("x" * 2000)]) as server:
        async with model_at(server.url) as model:
            with pytest.raises(SamplerError, match="more than 1000 bytes"):
                await model.reply(HELLO, ())


def test_a_key_that_is_not_set_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(ConfigError, match="the environment variable MY_KEY"):
        RemoteModel("m", EndpointConfig(url="http://x/v1", api_key_env="MY_KEY"), SAMPLING)
    with pytest.raises(ConfigError, match="takes no top_k"):
        RemoteModel("m", EndpointConfig(url="http://x/v1"), SamplingParams(max_tokens=1, top_k=3))


# --- whole episodes --------------------------------------------------------------------------------------------------


async def group_of(
    model: RemoteModel, make_env: Callable[[], Any], task: Task, *, size: int = 1, **rules: Any
) -> Group:
    return await RemoteGroupPlayer(
        group_size=size,
        make_env=make_env,
        chat=model,
        reward_runner=FakeRewardRunner(),
        temperature=1.0,
        max_turns=8,
        timeout_s=20.0,
        run_seed=0,
        **rules,
    )(task, 4)


async def test_a_remote_model_plays_a_world_with_tools_behind_our_own_endpoint() -> None:
    sampler, renderer = scripted(*CALLS)
    async with serve(renderer) as endpoint:
        record = endpoint.open(sampler=sampler, sampling=SAMPLING, seed=0, max_calls=9, max_tokens=4000)
        async with model_at(record.base_url) as model:
            group = await group_of(model, CalculatorEnv, SUM)
        endpoint.close(record)
    [scored] = group.episodes
    episode = scored.episode
    assert (episode.id, episode.success, episode.ended, episode.env_reward) == ("4/0", True, EndReason.DONE, 1.0)
    assert [step.state for step in episode.steps] == ["known 3 7 12", "known 3 7 12 19", "known 3 7 12 19 57"]
    assert [message.content for message in episode.messages if message.role == "tool"] == ["19", "57", "right"]
    assert episode.num_sampled == 0  # nothing of it can be trained
    assert len(record.steps) == 3  # though the endpoint, being ours, knows every token


async def test_calls_that_cannot_be_made_are_told_and_counted() -> None:
    answers = [
        ok(None, ("down", "{}")),
        ok("hm", ("up", "[1]")),
        ok("nothing"),
        ok('{"name": "up", "arguments": {}}'),  # a server that knows no calls
        ok("up we go", ("up", "{}"), ("up", '{"x": 1}')),
    ]
    with Server(answers) as server:
        async with model_at(server.url) as model:
            group = await group_of(model, lambda: FakeToolEnv(target=3), Task(id="t"))
    [scored] = group.episodes
    assert [step.valid for step in scored.episode.steps] == [False, False, False, True, True]
    assert [step.action for step in scored.episode.steps][1] == "hm\nup [1]"
    assert scored.episode.messages[2].content.endswith("with one of the tools up")
    assert server.asked[1]["messages"][1] == {"role": "assistant", "content": "down {}"}
    sent = server.asked[4]["messages"]
    assert sent[-2]["tool_calls"][0]["id"] == sent[-1]["tool_call_id"]


async def test_a_pattern_ends_a_remote_episode_too_and_words_go_to_step() -> None:
    with Server([ok("up"), ok("up, done")]) as server:
        async with model_at(server.url) as model:
            group = await group_of(model, lambda: FakeEnv(target=9), Task(id="t"), end_pattern=re.compile("done"))
    assert group.episodes[0].episode.ended is EndReason.END_PATTERN
    assert "tools" not in server.asked[0]


async def test_episodes_of_a_group_that_start_otherwise_are_failed() -> None:
    targets = iter([3, 4, 3])
    with Server([ok("stop")]) as server:
        async with model_at(server.url) as model:
            group = await group_of(model, lambda: FakeEnv(target=next(targets), limit=1), Task(id="t"), size=3)
    assert [scored.episode.id for scored in group.episodes] == ["4/0", "4/2"]
    assert "must start alike" in group.failed[0].reason
    first, second = (start_hash(scored.episode) for scored in group.episodes)
    assert first == second


async def test_a_model_that_fails_gives_a_failed_episode() -> None:
    with Server([(401, {}, {"error": {"message": "wrong key"}})]) as server:
        async with model_at(server.url) as model:
            group = await group_of(model, FakeEnv, Task(id="t"))
    assert group.failed[0].reason == "task t: m refused a request, status 401: wrong key"


# --- demonstrations --------------------------------------------------------------------------------------------------


async def test_demonstrations_are_rows_that_sft_reads_tools_and_all(tmp_path: Path) -> None:
    right = [ok("", ("calculate", '{"left": 12, "operator": "+", "right": 7}')), ok("", ("answer", '{"number": 19}'))]
    task = Task(id="add", data={"question": "12 + 7", "max_turns": 4, "tools": True})
    tools: dict[str, Any] = {}
    with Server(right) as server:
        async with model_at(server.url) as model:
            group = await group_of(model, record_tools(CalculatorEnv, tools), task)
    path = tmp_path / "made" / "demos.jsonl"
    assert write_demonstrations(path, [group], tools) == 1
    [talk] = load_conversations(DataSource(type="jsonl", path=str(path)))
    assert isinstance(talk, ToolConversation)
    assert [message.role for message in talk.messages] == ["user", "assistant", "tool", "assistant"]
    assert talk.messages[1].tool_calls[0].arguments == '{"left": 12, "operator": "+", "right": 7}'
    assert [tool["function"]["name"] for tool in talk.tools] == ["calculate", "answer"]
    row = demonstration(group.episodes[0])
    assert (row["reward"], row["success"], "tools" in row) == (1.0, True, False)


async def test_only_successes_are_shown_unless_all_are_wanted(tmp_path: Path) -> None:
    with Server([ok("answer 1 2")]) as server:
        async with model_at(server.url) as model:
            group = await group_of(model, CalculatorEnv, Task(id="a", data={"question": "12 + 7", "max_turns": 4}))
    with pytest.raises(DataError, match="none succeeded"):
        write_demonstrations(tmp_path / "none.jsonl", [group], {})
    assert not (tmp_path / "none.jsonl").exists()
    assert write_demonstrations(tmp_path / "all.jsonl", [group], {}, selection=EpisodeSelection(failures=True)) == 1


# --- the commands ----------------------------------------------------------------------------------------------------

RUN = """
[model]
path = "tiny"
[remote]
url = "{url}"
api_key_env = ""
[rl]
steps = 1
max_turns = 4
tasks = {{ type = "env", name = "add", size = 3, seed = 1 }}
rewards = [{{ fn = "exact_match" }}]
[eval]
source = {{ type = "env", name = "add", size = 2, seed = 2, options = {{ split = "held_out" }} }}
"""


def test_the_commands_play_with_a_model_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tasks = environment_tasks("add", 3, 1, {})
    answers = [ok(str(task.data["answer"])) for task in tasks[:2]] + [ok("no idea")]
    with Server(answers) as server:
        Path("run.toml").write_text(RUN.format(url=server.url), encoding="utf-8")
        arguments = ["demonstrate", "openai:m", "run.toml", "--out", "demos.jsonl", "--set", "remote.at_once=1"]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert "2 of 3 episodes are in demos.jsonl" in result.stdout
        evaluated = CliRunner().invoke(app, ["eval", "openai:m", "run.toml", "--json"])
    assert evaluated.exit_code == 0, evaluated.output
    metrics = json.loads(evaluated.stdout.splitlines()[-1])["arms"][0]["metrics"]
    assert metrics["eval/reward"] == 0.0
    assert "eval/length" not in metrics
    talks = load_conversations(DataSource(type="jsonl", path="demos.jsonl"))
    assert all(isinstance(talk, tuple) and talk[-1].role == "assistant" for talk in talks)


def test_training_with_it_is_refused_in_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RUN.format(url="http://x/v1"), encoding="utf-8")
    result = CliRunner().invoke(app, ["train", "run.toml", "--set", "model.path=openai:m"])
    assert isinstance(result.exception, ConfigError)
    assert "a remote model: no log-probs of its tokens are known, so it cannot be trained" in str(result.exception)
