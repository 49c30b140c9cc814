"""The examples of step credit and of judges run, and do what they say."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from headrace.algo.datum import conversation_datum
from headrace.algo.loss_weights import reweight
from headrace.config import Config, ModelConfig, RewardTermConfig, RlConfig, SourceConfig
from headrace.errors import ConfigError
from headrace.model.load import load_model
from headrace.model.tiny import save_tiny
from headrace.render import Renderer
from headrace.reward.judge import JudgeSettings, write_question
from headrace.train.torch_backend import TorchBackend
from headrace.types import CROSS_ENTROPY, Adam, Message, ScoredEpisode
from headrace.wiring.build.rewards import close_terms, make_reward_runner, make_terms
from support.examples import load, train
from support.paths import EXAMPLES


@pytest.mark.slow
def test_success_rises_from_raw_steps_through_gigpo_and_ppo(capsys: pytest.CaptureFixture[str]) -> None:
    example = load(EXAMPLES / "gigpo_ppo_training.py")
    figures = asyncio.run(example.main(example.Sizes(rl_steps=16)))
    assert figures["after"] > figures["before"] + 0.15
    shown = capsys.readouterr().out
    for number, stage in enumerate(("Raw steps", "Scored", "Anchor states", "Advantages", "Datum", "The PPO loss"), 1):
        assert f"\n{number}. {stage}" in shown
    total = re.search(r"loss/total +(\S+) +(\S+) +(\S+)", shown)
    assert total is not None
    before, _, after = map(float, total.groups())
    assert after < before, "the updates were made on these very data"
    sums = re.findall(r"go \w+ +(\S+) +(\S+) +(\S+) +(\S+)\n", shown.partition("\n4. ")[2].partition("\n5. ")[0])
    assert sums
    for _, episode, step, advantage in sums:  # A = A_E + A_S, in what is printed
        assert float(episode) + float(step) == pytest.approx(float(advantage), abs=2e-3)


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has learned to answer these questions with 7 of 10, which is a judge like any other."""
    folder = tmp_path_factory.mktemp("judge")
    save_tiny(folder, words=["SCORE:", "7", "question"], width=32, layers=1, heads=2, kv_heads=1, context=512, seed=0)
    lm = load_model(str(folder))
    renderer, backend = Renderer(lm.tokenizer, eos_tokens=lm.eos_tokens), TorchBackend(lm)
    example, verdict = load(EXAMPLES / "judge.py"), Message(role="assistant", content="SCORE: 7")
    judges = (replace(example.JUDGE, code=False), JudgeSettings(rubric="be right", code=False))
    data = [
        conversation_datum(part.tokens, part.trained)
        for judge in judges
        for number, answer in enumerate(example.ANSWERS)
        for part in renderer.conversation(
            (*write_question([example.answered(number, answer)], judge, ""), verdict), max_tokens=512
        )
    ]
    for _ in range(30):
        backend.forward_backward(reweight(data, weighting="token_mean"), CROSS_ENTROPY)
        backend.optim_step(Adam(learning_rate=1e-2)).result()
    backend.save_state(folder).result()
    backend.close()
    return folder


def test_a_judge_is_asked_through_a_sampler(
    seven: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = load(EXAMPLES / "judge.py")
    monkeypatch.setattr(example, "JUDGE", replace(example.JUDGE, code=False))  # this model has learned one sentence
    results = asyncio.run(example.main(str(seven)))
    assert [item.reward.total for item in results if isinstance(item, ScoredEpisode)] == [0.7] * 3
    assert capsys.readouterr().out.count(": 0.70\n") == 3


async def test_a_run_file_may_name_the_model_that_judges(seven: Path) -> None:
    term = RewardTermConfig(
        fn="judge", path=str(seven), weight=2.0, kwargs={"rubric": "be right", "max_tokens": 8, "code": False}
    )
    rl = RlConfig(steps=1, tasks=SourceConfig(type="env", name="add"), rewards=(term,))
    terms = make_terms(Config(model=ModelConfig(device="cpu"), rl=rl), None)
    [judged] = await make_reward_runner(terms, rl).score([load(EXAMPLES / "judge.py").answered(0, "42")])
    await close_terms(terms)
    assert isinstance(judged, ScoredEpisode)
    assert judged.reward.total == pytest.approx(1.4)
    wrong = replace(rl, rewards=(replace(term, kwargs={"rubric": "be right", "url": "http://x"}),))
    with pytest.raises(ConfigError, match="needs kwargs rubric, maybe max_tokens and temperature, and these are wrong"):
        make_terms(Config(rl=wrong), None)


@pytest.fixture
def judge_url() -> Iterator[str]:
    """An endpoint that compares the answers of a group with the expected one."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            expected, shown = body["messages"][1]["content"].split("\n", 1)
            wanted = json.loads(expected.removeprefix("Expected answer: "))
            scores = [10 if talk[-1]["content"] == wanted else 1 for talk in json.loads(shown)]
            [mark] = re.findall(r"must be (SCORES \w+:)", body["messages"][0]["content"])
            reply = {"choices": [{"message": {"role": "assistant", "content": f"{mark} {json.dumps(scores)}"}}]}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, *args: object) -> None:
            return None

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_run_is_judged_through_an_endpoint(judge_url: str, tmp_path: Path) -> None:
    """The example as it is, on a world that a tiny model knows the words of."""
    small = (
        'model.path="tiny"',
        "model.tiny={width=32, layers=1, heads=2, kv_heads=1, context=64}",
        'rl.tasks={type="env", name="add", size=20, seed=1, options={max_number=9}}',
        f"rl.rewards.0.kwargs.url={json.dumps(judge_url)}",
        'rl.rewards.1.fn="exact_match"',
        "rl.max_prompt_tokens=16",
        "rl.max_episode_tokens=32",
        "rl.sampling.max_tokens=4",
        "rl.steps=2",
    )
    steps = [record for record in train(EXAMPLES / "rl_judge.toml", tmp_path, *small) if "reward/mean" in record]
    assert len(steps) == 2
    for record in steps:
        right = record["reward/exact_match"]
        assert record["reward/judge"] == pytest.approx(right + 0.1 * (1 - right))
        assert record["reward/mean"] == pytest.approx(0.5 * record["reward/judge"] + right)
