"""Proofs about what is recorded: masks cover exactly the sampled tokens, and episodes stay in their group."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.envs import environment_demonstrations
from headrace.render import Rendered, Renderer
from headrace.types import CreditedEpisode, Datum, Group, Message, Task
from headrace.verify.property_result import Figure, PropertyResult
from headrace.verify.subject import SEED, WORLD, Played, VerifySubject, luck

CONVERSATIONS = 4
ADVANTAGE_DECIMALS = 5  # data hold float32
Trained = tuple[bytes, int, float, float]  # the tokens before it, the token, its log-prob, its advantage


def prove_masks(parts: VerifySubject, played: Played) -> PropertyResult:
    """Rollouts: each sampled token is trained once, in the very context it was sampled in, with its own log-prob and
    its step's advantage, and nothing else is. Conversations: the assistant's turns by the model's own template."""
    expected = Counter(token for episode in played.credited for token in sampled_tokens(episode))
    found = Counter(token for datum in played.data for token in trained_tokens(datum))
    talks = environment_demonstrations(WORLD, CONVERSATIONS, SEED, {})
    turns = sum(message.role == "assistant" for talk in talks for message in talk)
    wrong = sum(wrong_turns(parts.renderer, parts.lm.tokenizer, talk) for talk in talks)
    return PropertyResult(
        name="masks cover what was sampled",
        figures=(
            Figure(
                label="tokens of rollouts marked wrongly",
                value=float(((expected - found) + (found - expected)).total()),
                bound=0.0,
            ),
            Figure(label="turns of conversations marked wrongly", value=float(wrong), bound=0.0),
        ),
        detail=f"{expected.total()} sampled tokens, and {turns} assistant turns under the model's chat template",
    )


def sampled_tokens(credited: CreditedEpisode) -> Iterator[Trained]:
    """What must be trained, read off the steps."""
    for step, advantage in zip(credited.scored.episode.steps, credited.advantages, strict=True):
        done = step.completion
        for index, token in enumerate(done.tokens.tolist()):
            context = np.concatenate([step.prompt, done.tokens[:index]])
            yield _entry(context, token, done.sampler_logprobs[index], advantage)


def trained_tokens(datum: Datum) -> Iterator[Trained]:
    """What would be trained, read off a datum."""
    arrays = datum.arrays
    for index in np.flatnonzero(arrays["weights"]).tolist():
        logprob, advantage = arrays["sampler_logprobs"][index], arrays["advantages"][index]
        yield _entry(datum.inputs[: index + 1], int(datum.targets[index]), logprob, advantage)


def _entry(context: npt.NDArray[np.int32], token: int, logprob: float, advantage: float) -> Trained:
    return context.astype(np.int32).tobytes(), token, float(logprob), round(float(advantage), ADVANTAGE_DECIMALS)


def wrong_turns(renderer: Renderer, tokenizer: Any, talk: Sequence[Message]) -> int:
    """Assistant turns of a conversation that are not marked from the end of their prompt to their end-of-turn token."""
    runs = [run for rendered in renderer.conversation(talk) for run in marked_runs(rendered)]
    replies = [index for index, message in enumerate(talk) if message.role == "assistant"]
    wrong = abs(len(runs) - len(replies))
    for (before, run), index in zip(runs, replies, strict=False):
        starts = before == renderer.prompt(talk[:index]).tolist()
        says = _squeezed(tokenizer.decode(run[:-1])).endswith(_squeezed(talk[index].content))
        ends = run[-1] in renderer.eos_tokens
        wrong += not (starts and says and ends)
    return wrong


def marked_runs(rendered: Rendered) -> list[tuple[list[int], list[int]]]:
    """Every unbroken run of marked tokens, with all tokens before it."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], rendered.trained.astype(np.int8), [0]])))
    tokens = rendered.tokens.tolist()
    return [(tokens[:start], tokens[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _squeezed(text: str) -> str:
    return "".join(text.split())


def prove_groups(parts: VerifySubject, played: Played) -> PropertyResult:
    """Groups ended in reverse; each still has its task and its episodes, and is compared with itself alone."""
    strayed = sum(strays(group, played.drawn) for group in played.groups)
    misjudged = sum(not _judged_rightly(episode, played.groups) for episode in played.credited)
    return PropertyResult(
        name="groups keep their identity",
        figures=(
            Figure(label="episodes in another task's group", value=float(strayed), bound=0.0),
            Figure(label="episodes compared with another group", value=float(misjudged), bound=0.0),
        ),
        detail=f"{len(played.credited)} episodes of {len(played.groups)} groups that ended in reverse",
    )


def strays(group: Group, drawn: Sequence[Task]) -> int:
    """Episodes that are not of the task that the group with this id was started for, or have another's reward."""
    return sum(
        scored.episode.task.id != drawn[group.id].id
        or scored.episode.id.split("/")[0] != str(group.id)
        or scored.reward.total != luck(scored.episode.id)
        for scored in group.episodes
    )


def _judged_rightly(credited: CreditedEpisode, groups: Sequence[Group]) -> bool:
    """Its advantages are its reward minus the mean of the group in whose name it was played."""
    own = credited.scored.episode.id.split("/")[0]
    rewards = [luck(s.episode.id) for group in groups for s in group.episodes if s.episode.id.split("/")[0] == own]
    expected = luck(credited.scored.episode.id) - sum(rewards) / len(rewards)
    return str(credited.group_id) == own and bool(np.allclose(credited.advantages, expected, rtol=0, atol=1e-9))
