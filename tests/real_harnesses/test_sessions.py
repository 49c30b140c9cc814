"""Unmodified harnesses on the endpoint: what would be trained is what the sampler saw and sampled, token by token."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from headrace.algo.datum import chains
from headrace.infer.openai_api import serve
from headrace.render import Renderer
from headrace.rollout.agent_program import play_program
from headrace.types import EndReason, Episode, SamplingParams, Task
from support.agent_programs import KeepingSampler, Noise, heard_spans, make_tokenizer, scripted, trained_spans
from support.harnesses import call_text, programs, put_in_path, repair_task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REPAIR = "sed -i s/-/+/ adder.py && python3 check.py"
MINI = (
    call_text("bash", command="cat adder.py"),
    f"The sign is wrong.\n{call_text('bash', command=REPAIR)}",
    call_text("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
)
READ = f"let me look\n{call_text('Read', file_path='adder.py')}"
BASH = call_text("Bash", command=REPAIR, description="repair")
CLAUDE = (READ, BASH, "Done.")


async def play(program: Callable[[str, Task], Awaitable[Any]], sampler: Any, renderer: Renderer) -> Episode:
    async with serve(renderer) as endpoint:
        return await play_program(
            program,
            task=repair_task(),
            endpoint=endpoint,
            sampler=sampler,
            sampling=SamplingParams(max_tokens=600),
            seed=5,
            max_turns=10,
            max_episode_tokens=200_000,
        )


@pytest.mark.parametrize(
    ("binary", "program", "replies"),
    [
        ("mini", "mini_swe_agent", MINI),
        ("mini", "mini_swe_agent_responses", MINI),
        ("claude", "claude_code", CLAUDE),
    ],
)
async def test_a_repair_is_one_sample_of_the_very_tokens(
    binary: str, program: str, replies: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_path(binary, monkeypatch)
    sampler, renderer = scripted(*replies)
    episode = await play(getattr(programs(), program), sampler, renderer)
    assert (episode.success, episode.ended) == (True, EndReason.DONE)
    assert len(sampler.heard) == 3
    assert list(chains(episode.steps)) == [(0, 1, 2)]
    assert trained_spans(episode) == heard_spans(sampler)
    results = [message.content for message in episode.messages if message.role == "tool"]
    assert "return a - b" in results[0]  # the harness ran what the model called


@pytest.mark.parametrize(
    ("binary", "program", "calls"),
    [("mini", "mini_swe_agent", 3), ("mini", "mini_swe_agent_responses", 3), ("claude", "claude_code", 1)],
)
async def test_a_model_that_babbles_is_survived_and_recorded(
    binary: str, program: str, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mini-swe-agent gives up after three replies without a call; Claude Code takes any text for the end."""
    put_in_path(binary, monkeypatch)
    tokenizer = make_tokenizer()
    sampler = KeepingSampler(Noise(tokenizer))
    episode = await play(getattr(programs(), program), sampler, Renderer(tokenizer))
    assert (episode.success, len(episode.steps)) == (False, calls)
    assert trained_spans(episode) == heard_spans(sampler)


def claude(base_url: str, task: Task, script: str) -> Awaitable[Any]:
    """Run a script that starts Claude Code, with the question in $1."""
    harnesses = programs()
    variables = {
        "ANTHROPIC_BASE_URL": base_url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "CLAUDE_CODE_MAX_RETRIES": "0",
    }
    running: Awaitable[Any] = harnesses.repair(["sh", "-c", script, "sh", harnesses.question(task)], variables, task)
    return running


async def test_a_sub_agent_is_a_sample_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_path("claude", monkeypatch)

    async def with_agents(base_url: str, task: Task) -> Any:
        tools = "Bash,Read,Edit,Agent"
        options = f"--model policy --tools {tools} --allowedTools {tools} --disable-slash-commands"
        return await claude(base_url, task, f'claude --print "$1" --system-prompt "You repair programs." {options}')

    delegated = call_text(
        "Agent",
        description="find the bug",
        prompt="Read adder.py and say what is wrong.",
        subagent_type="general-purpose",
        run_in_background=False,
    )
    sampler, renderer = scripted(delegated, "The sign is wrong.", BASH, "Done.")
    episode = await play(with_agents, sampler, renderer)
    assert episode.success
    assert list(chains(episode.steps)) == [(0,), (1,), (2, 3)]  # main, the sub-agent, main again
    assert trained_spans(episode) == heard_spans(sampler)
    assert "The sign is wrong." in renderer.decode(episode.steps[2].prompt)


async def test_compaction_begins_a_new_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_path("claude", monkeypatch)

    async def compacting(base_url: str, task: Task) -> Any:
        options = (
            '--model policy --bare --tools Bash,Read --allowedTools Bash,Read --system-prompt "You repair programs."'
        )
        begun, compacted = f'claude --print "$1" {options}', f"claude --print /compact --continue {options}"
        return await claude(base_url, task, f'{begun}; {compacted}; claude --print "Go on." --continue {options}')

    summary = "<summary>The sign in adder.py is wrong.</summary>"
    sampler, renderer = scripted(READ, "I have seen it.", summary, BASH, "Done.")
    episode = await play(compacting, sampler, renderer)
    assert episode.success
    assert trained_spans(episode) == heard_spans(sampler)
    assert list(chains(episode.steps))[-1] == (3, 4)
    assert len(sampler.heard) == 5
    prompt = renderer.decode(episode.steps[3].prompt)
    assert "The sign in adder.py is wrong." in prompt
    assert "let me look" not in prompt  # what was compacted is gone from it
