"""Rewards at the reference service: the same numbers as in the run's own process, and a sentence for what is wrong."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from headrace.errors import ConfigError, RewardError
from headrace.model.load import load_model
from headrace.model.tiny import save_tiny
from headrace.model.value_head import with_scalar_head
from headrace.observe.sinks.jsonl import read_metrics
from headrace.reward.remote_term import RemoteReward, remote_term, reward_from_json
from headrace.service.http.server import serving
from headrace.service.settings import load_serve_config
from headrace.types import Episode, Reward, int_array
from headrace.wiring.checked_config import load_checked
from headrace.wiring.commands.serve_references import make_reward_runners, open_reference_server
from headrace.wiring.commands.train import train
from support.reward_episodes import episode

FUNCTIONS = """
def long(messages, **kwargs):
    return {"score": float(len(messages[-1]["content"])), "reason": "length"}

def ranked(episodes):
    return [float(place) for place, _ in enumerate(episodes)]

def broken(messages, **kwargs):
    raise ValueError("no such dictionary")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("rewards")
    (made / "mine.py").write_text(FUNCTIONS)
    save_tiny(made / "base", words=("a", "b", "c"), width=32, layers=1, heads=4, kv_heads=2, context=64, seed=5)
    lm = with_scalar_head(load_model(str(made / "base")))
    torch.nn.init.normal_(lm.model.score.weight, generator=torch.Generator().manual_seed(0))
    lm.model.save_pretrained(made / "judge")
    lm.tokenizer.save_pretrained(made / "judge")
    return made


def serve_toml(folder: Path) -> str:
    rewards = "".join(
        f'[[rewards]]\nname = "{name}"\nfn = "{folder}/mine.py:{name}"\ntrusted = true\n'
        for name in ("long", "ranked", "broken")
    )
    own = '[[rewards]]\nname = "exact"\nfn = "exact_match"\n'
    model = f'[[reward_models]]\nname = "judge"\npath = "{folder}/judge"\n'
    return f'[model]\ndevice = "cpu"\n{rewards}{own}{model}'


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    config = load_serve_config(serve_toml(folder), file="serve.toml")
    with open_reference_server(config) as (app, names), serving(app) as found:
        assert names == ("broken", "exact", "judge", "long", "ranked")
        yield found


@pytest.fixture
def group() -> list[Episode]:
    made = []
    for number, text in enumerate(("left", "to the right", "up")):
        played = episode(text)
        tokens = replace(played.steps[0].completion, tokens=int_array([5 + number]))
        made.append(replace(played, steps=(replace(played.steps[0], completion=tokens),)))
    return made


def score(url: str, name: str, group: list[Episode]) -> list[Any]:
    remote = RemoteReward(f"{url}/{name}")
    try:
        return remote.score(group)
    finally:
        remote.close()


def totals(rewards: list[Any]) -> list[float]:
    assert all(isinstance(reward, Reward) for reward in rewards), rewards
    return [reward.total for reward in rewards]


def test_names_are_listed(url: str) -> None:
    assert httpx.get(f"{url}/rewards").json() == {"rewards": ["broken", "exact", "judge", "long", "ranked"]}


def test_functions_judge_what_a_run_sends(url: str, group: list[Episode]) -> None:
    last = [float(len(each.messages[-1].content)) for each in group]
    assert totals(score(url, "long", group)) == last
    assert totals(score(url, "ranked", group)) == [0.0, 1.0, 2.0]  # of the group as a whole


def test_every_reward_is_the_one_of_this_process(url: str, folder: Path, group: list[Episode]) -> None:
    here = make_reward_runners(load_serve_config(serve_toml(folder), file="serve.toml"))

    async def locally(name: str) -> list[float]:
        return [result.reward.total for result in await here[name].score(group)]  # type: ignore[union-attr]

    for name in ("judge", "long"):
        found = totals(score(url, name, group))
        assert found == asyncio.run(locally(name))
        assert len(set(found)) > 1


def test_an_episode_without_a_reward_has_a_sentence(url: str, group: list[Episode]) -> None:
    first, *_ = score(url, "broken", group)
    assert isinstance(first, RewardError)
    assert "no such dictionary" in str(first)
    missing, *_ = score(url, "exact", group)  # these tasks have no answer
    assert isinstance(missing, RewardError)
    assert '"answer"' in str(missing)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"nonsense", "the body is not JSON"),
        (b"[]", "with 1 to 1024 episodes"),
        (b'{"episodes": []}', "with 1 to 1024 episodes"),
        (b'{"episodes": [{"id": 1}]}', "episode 0 is not one as a run sends it"),
    ],
)
def test_a_wrong_body_is_refused_by_a_sentence(url: str, body: bytes, words: str) -> None:
    reply = httpx.post(f"{url}/rewards/long", content=body)
    assert reply.status_code == 400
    assert words in reply.text
    unknown = httpx.post(f"{url}/rewards/other", content=body)
    assert unknown.status_code == 404
    assert "there is no reward 'other' here: broken, exact" in unknown.text


def test_a_server_without_the_reward_is_found_before_the_run(url: str) -> None:
    with pytest.raises(ConfigError, match="has no reward 'other': it has broken, exact, judge, long, ranked"):
        RemoteReward(f"{url}/other").check()
    with pytest.raises(ConfigError, match="did not answer for 0 s"):
        RemoteReward("http://127.0.0.1:9/long", retry_s=0.0).check()


def test_a_server_that_fails_gives_no_reward(group: list[Episode]) -> None:
    replies = iter([httpx.Response(503, text="busy"), httpx.Response(200, json={"rewards": [{"total": 1.0}]})])
    waited: list[float] = []
    remote = RemoteReward(
        "http://there/long", transport=httpx.MockTransport(lambda request: next(replies)), sleep=waited.append
    )
    first, *_ = remote.score(group)
    assert waited == [0.1]
    assert "one reward for each episode" in str(first)
    dead = RemoteReward(
        "http://there/long", retry_s=0.0, transport=httpx.MockTransport(lambda request: httpx.Response(503, text="no"))
    )
    answers = asyncio.run(remote_term("long", dead).judge(group))  # type: ignore[arg-type]
    assert [str(answer) for answer in answers] == [str(answers[0])] * 3
    assert "did not answer for 0 s: status 503: no" in str(answers[0])


@pytest.mark.parametrize("answer", [7, {"total": "x"}, {"total": float("inf")}, {}, {"total": 1.0, "steps": 3}])
def test_what_is_no_reward_is_an_error(answer: object) -> None:
    assert "sent what is no reward" in str(reward_from_json(answer, "it"))


RUN = """
[model]
path = "BASE"
device = "cpu"
[rl]
steps = 2
groups = 1
group_size = 2
max_episode_tokens = 60
max_prompt_tokens = 40
sampling.max_tokens = 8
[rl.tasks]
type = "jsonl"
path = "tasks.jsonl"
"""


def trained(folder: Path) -> Path:
    config = load_checked(folder / "run.toml", [f'run.folder="{folder / "runs"}"'], command="train")
    return train(config, config_text_path=folder / "run.toml", resume=None).folder


def test_a_run_is_rewarded_by_the_server(url: str, folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"say {word}", "answer": word} for word in ("a", "b")]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = f'rewards = [{{ fn = "{url}/long", weight = 0.5 }}, {{ fn = "reward_model", path = "{url}/judge" }}]\n'
    (tmp_path / "run.toml").write_text(
        RUN.replace("[rl.tasks]", f"{rewards}[rl.tasks]").replace("BASE", f"{folder}/base")
    )
    run = trained(tmp_path)
    records = [record for record in read_metrics(run / "metrics.jsonl") if record.stage == "rl"]
    assert len(records) == 2
    for record in records:
        values = record.values
        assert values["reward/long"] > 0
        assert values["reward/mean"] == pytest.approx(0.5 * values["reward/long"] + values["reward/reward_model"])


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ('{ fn = "http://here" }', r"write http://HOST:PORT/NAME"),
        ('{ fn = "reward_model", path = "http://here" }', r"write http://HOST:PORT/NAME"),
        ('{ fn = "http://here/x", kwargs = { a = 1 } }', "those of a server are in its own file"),
    ],
)
def test_a_url_of_a_run_file_names_a_reward(tmp_path: Path, folder: Path, reward: str, words: str) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "x"}\n')
    text = RUN.replace("[rl.tasks]", f"rewards = [{reward}]\n[rl.tasks]").replace("BASE", f"{folder}/base")
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        trained(tmp_path)


def test_a_name_is_of_one_reward(folder: Path) -> None:
    twice = serve_toml(folder) + f'[[reward_models]]\nname = "long"\npath = "{folder}/judge"\n'
    with pytest.raises(ConfigError, match="each name once"):
        load_serve_config(twice, file="serve.toml")
