"""The Python of the reference pages runs: each block as a script, behind the lines that a reader would have written."""

import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT, TESTS
from support.site_blocks import Block, blocks_of
from support.site_runs import Machine, PageRun, machine, page_run

SERVE = """
[serve]
port = 8765
folder = "service"
[[rewards]]
name = "exact"
fn = "judge.py:exact"
trusted = true
"""
JUDGE = "def exact(text, truth):\n    return float(text.strip() == truth)\n"
DATA = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
import os
import numpy as np
from pathlib import Path
from headrace.types import CROSS_ENTROPY, Adam, Datum, LossSpec, SampleRequest, SamplingParams, float_array, int_array

def datum(**arrays):
    tokens = int_array(range(5, 13))
    made = {{"weights": np.ones(7, np.float32), **arrays}}
    return Datum(inputs=tokens[:-1], targets=tokens[1:], arrays={{k: float_array(v) for k, v in made.items()}})

data = [datum()]
prompt, params = int_array([5, 6, 7]), SamplingParams(max_tokens=4)
prompts = [prompt, prompt]
"""
CLIENT = """
from headrace.service.client import FutureGroup, ServerInputs, ServiceClient

service = ServiceClient(os.environ["TINKER_BASE_URL"], api_key=os.environ["TINKER_API_KEY"])
model = service.create_training(rank=4, seed=0).result()
sampler = service.create_sampling(snapshot=model.snapshot().result()).result()
sampled = np.full(7, -3.0)
"""
SDK = """
import tinker
from tinker import types

model = tinker.ServiceClient().create_lora_training_client(base_model="headrace/tiny", rank=4, seed=0)
adam = types.AdamParams(learning_rate=0.01)
prompt, targets = types.ModelInput.from_ints([5, 6, 7]), {"target_tokens": [6, 7, 8], "weights": [1.0] * 3}
plain = types.Datum(model_input=prompt, loss_fn_inputs=targets)
logprobs = model.forward([plain], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].tolist()
inputs = {**targets, "logprobs": logprobs, "advantages": [1.0, -1.0, 1.0]}
data = [types.Datum(model_input=prompt, loss_fn_inputs=inputs)]
"""
MODELS_OF_RANKS = """
from support import fsdp

def build_model(path):
    return fsdp.build_model()
"""
RUN = """
[model]
path = "tiny"
[run]
name = "demo"
[rl]
steps = 1
groups = 2
group_size = 2
max_prompt_tokens = 16
max_episode_tokens = 32
sampling = { max_tokens = 4 }
tasks = { type = "env", name = "add", size = 20 }
rewards = [{ fn = "exact_match" }]
[eval]
source = { type = "env", name = "add", size = 2, options = { split = "held_out" } }
"""


@pytest.fixture(scope="module")
def hub_and_commands() -> Iterator[Machine]:
    with machine() as made:
        yield made


@pytest.fixture(scope="module")
def served(hub_and_commands: Machine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageRun]:
    """A `headrace serve` of the tiny model, with a reward function that evaluations may name."""
    with page_run(hub_and_commands, tmp_path_factory.mktemp("service")) as state:
        state.run(Block(page="test", line=0, language="python", text=JUDGE, title="judge.py"))
        state.run(Block(page="test", line=0, language="toml", text=SERVE, title="serve.toml"))
        state.run(Block(page="test", line=0, language="bash", text="headrace serve serve.toml", serves="serve.toml"))
        yield state


def python_of(page: str) -> list[Block]:
    return [block for block in blocks_of(page) if block.language == "python"]


def script(block: Block, before: str, after: str = "", replace: tuple[str, str] = ("", "")) -> Block:
    """A script of the block with what is before it; a block that awaits becomes a coroutine, which is run."""
    text = block.text.replace(*replace) if replace[0] else block.text
    text = text.replace('api_key="tml-..."', "api_key=os.environ['TINKER_API_KEY']")
    if "await " in text or "async with" in text:
        body = textwrap.indent(text + after, "    ")
        text, after = f"import asyncio\n\n\nasync def main():\n{body}\n\nasyncio.run(main())\n", ""
    return Block(page=block.page, line=block.line, language="python", text=f"{before}\n{text}\n{after}")


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_service_client(served: PageRun) -> None:
    first, futures, group, inputs = python_of("service-client.md")
    served.run(script(first, DATA, "assert len(completion.tokens) <= 4"))
    served.run(script(futures, DATA + CLIENT, "assert out.loss > 0"))
    served.run(script(group, DATA + CLIENT, "assert len(group.all().result()) == 2"))
    for name in ("ppo + reference_kl_k3", "ppo + shared_value"):  # the two losses read other arrays
        assert f'(data, LossSpec(fn="{name}")' in inputs.text
    before = f"""{DATA}{CLIENT}
data = [datum(sampler_logprobs=sampled, advantages=np.ones(7))]
rewarded = [datum(sampler_logprobs=sampled, rewards=np.eye(7)[6])]
"""
    served.run(
        script(
            inputs,
            before,
            replace=('(data, LossSpec(fn="ppo + shared_value")', '(rewarded, LossSpec(fn="ppo + shared_value")'),
        )
    )


def test_tinker(served: PageRun) -> None:
    _, limit, openai = python_of("tinker.md")  # the first is run by tests/service/test_serve.py
    served.run(script(limit, SDK, 'assert metrics["train/kept_kl:max"] <= 0.02'))
    served.run(script(openai, "import os", "assert reply.choices"))


def test_reference_models(served: PageRun) -> None:
    (block,) = python_of("reference-models.md")
    before = f"""{DATA}{CLIENT}
own, start = model, model.save_for_sampler("start").result()
pair = [replace(datum(preferences=np.full(7, sign)), unit=0) for sign in (1.0, -1.0)]
{SDK}"""
    first, _, second = block.text.partition("model.forward_backward(\n    data")
    assert first.startswith("model.forward_backward(data,")
    assert "# the public SDK" in first
    assert "# our client" in second
    second = second.replace('"tinker://RUN/sampler_weights/start"', "start")
    text = f"""from dataclasses import replace
{before}
by_sdk = {first}
by_client = own.forward_backward(
    pair{second}
assert "loss:sum" in by_sdk.result().metrics
assert abs(by_client.result().loss - np.log(2)) < 1e-3  # nothing was trained: policy and reference are the same
"""
    served.run(Block(page=block.page, line=block.line, language="python", text=text))


def test_adapters(hub_and_commands: Machine, tmp_path: Path) -> None:
    (block,) = python_of("adapters.md")
    before = (
        DATA
        + """
from support.adapter_hosts import small_model
from headrace.service.host.adapter_host import AdapterHost
from headrace.service.host.model_host import AdapterSpec

def load_model(name):
    return small_model()

request = SampleRequest(prompt=prompt, params=params)
"""
    )
    after = "assert (Path('alice') / 'adapter_config.json').exists(), list(Path('alice').iterdir())\nhost.close()\n"
    with page_run(hub_and_commands, tmp_path) as state:
        state.run(script(block, before, after))


def test_agents(hub_and_commands: Machine, tmp_path: Path) -> None:
    agent, play = python_of("agents.md")
    before = (
        DATA
        + agent.text
        + """
from support.agent_programs import scripted
from headrace.types import Message, Task

engine, renderer = scripted("6")
task = Task(id="t", messages=(Message(role="user", content="1 + 5?"),), data={"answer": "6"})
"""
    )
    with page_run(hub_and_commands, tmp_path) as state:
        state.run(script(play, before, "assert episode.success"))


def test_run_folder(hub_and_commands: Machine, tmp_path: Path) -> None:
    metrics, rollouts = python_of("run-folder.md")
    with page_run(hub_and_commands, tmp_path) as state:
        state.run(Block(page="test", line=0, language="toml", text=RUN, title="run.toml"))
        state.run(Block(page="test", line=0, language="bash", text="headrace train run.toml"))
        (folder,) = tmp_path.glob("runs/demo_*")
        before = f"import os, shutil\nshutil.copytree({str(folder)!r}, 'runs/demo_2026-03-01T12-00-05Z')\n"
        state.run(script(metrics, before, "assert len(rewards) == 2"))
        step = next(folder.glob("rollouts/step_*.jsonl")).name
        held_out = next(folder.glob("rollouts/eval_*.jsonl")).name
        text = rollouts.text.replace("runs/...", str(folder)).replace("step_000012.jsonl", step)
        shown = Block(page=rollouts.page, line=0, language="python", text=text.replace("eval_rl.jsonl", held_out))
        state.run(script(shown, "from pathlib import Path", "assert len(episodes) == 4 and lines"))


def test_tool_server_of_the_environments(hub_and_commands: Machine, tmp_path: Path) -> None:
    """docs/how-to/tools.md has the same server, which a run starts; here the page's own is asked for its tools."""
    (server,) = python_of("builtin-environments.md")
    asked = """
import asyncio
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client

async def main():
    async with stdio_client(StdioServerParameters(command="python", args=["server.py"])) as streams:
        async with ClientSession(*streams) as session:
            await session.initialize()
            assert [tool.name for tool in (await session.list_tools()).tools] == ["add"]
            assert (await session.call_tool("add", {"a": 2, "b": 3})).content[0].text == "5"

asyncio.run(main())
"""
    with page_run(hub_and_commands, tmp_path) as state:
        (tmp_path / "server.py").write_text(server.text, encoding="utf-8")
        state.run(Block(page=server.page, line=server.line, language="python", text=asked))


def test_scale(hub_and_commands: Machine, tmp_path: Path) -> None:
    (block,) = python_of("scale.md")
    (tmp_path / "models_of_ranks.py").write_text(MODELS_OF_RANKS, encoding="utf-8")
    after = """
out = backend.forward_backward(data, CROSS_ENTROPY).result()
backend.optim_step(Adam(learning_rate=1e-3)).result()
assert out.loss > 0
backend.close()
ranks.close()
"""
    with page_run(hub_and_commands, tmp_path) as state:
        state.variables["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, TESTS, tmp_path)))
        state.run(script(block, DATA + "from models_of_ranks import build_model\n", after))
