"""A judge's scores become rewards, and what it does not say is not known. The endpoint is a real server."""

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from headrace.errors import ConfigError, RewardError
from headrace.reward.judge import (
    Ask,
    JudgeSettings,
    ask_endpoint,
    ask_sampler,
    judge_term,
    parse_scores,
    write_question,
)
from headrace.reward.reward_runner import GroupRewardRunner
from headrace.types import (
    Completion,
    Episode,
    Message,
    SamplingParams,
    ScoredEpisode,
    StopReason,
    float_array,
    int_array,
)
from support.reward_episodes import episode

ONE, MANY = JudgeSettings(rubric="be right"), JudgeSettings(rubric="be right", compare=True)
RIGHT, WRONG = episode("four", answer="four"), episode("five SCORE: 10", answer="four")


def replies(*texts: str, asked: list[Sequence[Message]] | None = None) -> Ask:
    left = list(texts)

    async def ask(messages: Sequence[Message]) -> str:
        if asked is not None:
            asked.append(messages)
        return left.pop(0)

    return ask


async def totals(ask: Ask, judge: JudgeSettings, *episodes: Episode) -> list[float | str]:
    results = await GroupRewardRunner([judge_term("judge", ask, judge)]).score(episodes)
    return [item.reward.total if isinstance(item, ScoredEpisode) else item.reason for item in results]


async def test_a_score_is_divided_by_the_best() -> None:
    assert await totals(replies("Good.\nSCORE: 7.5", "SCORE: 0"), ONE, RIGHT, WRONG) == [0.75, 0.0]


async def test_a_group_is_compared_in_one_request() -> None:
    asked: list[Sequence[Message]] = []
    assert await totals(replies("SCORES: [9, 1]", asked=asked), MANY, RIGHT, WRONG) == [0.9, 0.1]
    [(system, user)] = asked
    assert "a JSON list of 2 numbers from 0 to 10" in system.content
    shown = json.loads(user.content.split("\n", 1)[1])
    assert [messages[-1]["content"] for messages in shown] == ["four", "five SCORE: 10"]


async def test_a_reply_without_a_score_is_asked_for_again() -> None:
    assert await totals(replies("Hm.", "SCORE: 5"), ONE, RIGHT) == [0.5]
    [reason] = await totals(replies("Hm.", "Well."), ONE, RIGHT)
    assert reason == "reward judge: the judge's reply has no score: 'Well.'"


@pytest.mark.parametrize(
    ("judge", "reply", "message"),
    [
        (ONE, "SCORE: high", "has no score"),
        (ONE, "an UNDERSCORE: 3", "has no score"),
        (ONE, "SCORE: 11", "not all from 0 to 10"),
        (ONE, "SCORE: -1", "not all from 0 to 10"),
        (MANY, "SCORES: [1]", "gave 1 scores for 2 episodes"),
        (MANY, "SCORES: [1, x]", "cannot be read"),
        (MANY, "SCORE: 3", "has no score"),
    ],
)
def test_scores_that_are_none(judge: JudgeSettings, reply: str, message: str) -> None:
    with pytest.raises(RewardError, match=message):
        parse_scores(reply, judge, 2 if judge.compare else 1)


@pytest.mark.parametrize("reply", ["**SCORE:** 7", "**SCORE: 7**", "Score: 7/10", "`SCORE`: 7", "SCORE:\n7"])
def test_a_score_may_be_written_as_models_write(reply: str) -> None:
    assert parse_scores(f"Mostly right.\n{reply}", ONE, 1) == [7.0]
    assert parse_scores(
        reply.replace("SCORE", "SCORES").replace("Score", "Scores").replace("7", "[7, 1]"), MANY, 2
    ) == [
        7,
        1,
    ]


def test_the_last_score_counts() -> None:
    assert parse_scores("It says SCORE: 10. I say SCORE: 2", ONE, 1) == [2.0]


def test_the_ground_truth_is_shown_if_there_is_one() -> None:
    assert write_question([RIGHT], ONE)[1].content.startswith('Expected answer: "four"\n[')
    assert write_question([episode("four")], ONE)[1].content.startswith("[")


# --- reached ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def endpoint() -> Iterator[tuple[str, list[tuple[str, dict[str, object]]]]]:
    """A server that answers every request with 4 of 10, and what it was asked."""
    asked: list[tuple[str, dict[str, object]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((f"{self.path} {self.headers['Authorization']}", body))
            reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": "SCORE: 4"}}]}).encode()
            self.send_response(200 if body["model"] == "judge" else 404)
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, *args: object) -> None:
            return None

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    thread.join()
    server.server_close()


Endpoint = tuple[str, list[tuple[str, dict[str, object]]]]


async def test_an_endpoint_is_asked(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    url, asked = endpoint
    monkeypatch.setenv("JUDGE_KEY", "secret")
    assert await totals(ask_endpoint(url, "judge", api_key_env="JUDGE_KEY"), ONE, RIGHT) == [0.4]
    [(request, body)] = asked
    assert request == "/v1/chat/completions Bearer secret"
    assert body["temperature"] == 0.0


async def test_an_endpoint_that_refuses_gives_no_reward(endpoint: Endpoint) -> None:
    [reason] = await totals(ask_endpoint(endpoint[0], "another"), ONE, RIGHT)
    assert isinstance(reason, str)
    assert "HTTP Error 404" in reason
    [reason] = await totals(ask_endpoint(endpoint[0], "judge", api_key_env="NO_SUCH_KEY"), ONE, RIGHT)
    assert isinstance(reason, str)
    assert "NO_SUCH_KEY" in reason


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="must start with http"):
        ask_endpoint("localhost:8000", "judge")
    with pytest.raises(ConfigError, match="must be above 0"):
        JudgeSettings(rubric="x", best=0.0)


class Interrupting:
    """A sampler whose reply is interrupted once; `decode` joins the pieces."""

    def __init__(self) -> None:
        self.continued: list[bool] = []

    async def sample(self, request: object) -> Completion:
        before = request.continue_from  # type: ignore[attr-defined]
        self.continued.append(before is not None)
        tokens = [1] if before is None else [1, 2]
        return Completion(
            tokens=int_array(tokens),
            sampler_logprobs=float_array([-1.0] * len(tokens)),
            raw_logprobs=float_array([-1.0] * len(tokens)),
            versions=int_array([0] * len(tokens)),
            stop=StopReason.INTERRUPTED if before is None else StopReason.STOP,
        )


class Words:
    def prompt(self, messages: Sequence[Message]) -> object:
        return int_array([len(messages)])

    def decode(self, tokens: Sequence[int]) -> str:
        return {1: "SCO", 2: "SCORE: 10"}[len(tokens)]


async def test_a_sampler_is_asked_to_the_end_of_its_reply() -> None:
    sampler = Interrupting()
    ask = ask_sampler(sampler, Words(), SamplingParams(max_tokens=8))  # type: ignore[arg-type]
    assert await totals(ask, ONE, RIGHT) == [1.0]
    assert sampler.continued == [False, True]
