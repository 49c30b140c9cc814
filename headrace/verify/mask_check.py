"""Check the training data: masks cover exactly the sampled tokens, and episodes stay in their group."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.envs import environment_demonstrations
from headrace.render import Rendered, Renderer
from headrace.types import CreditedEpisode, Datum, Group, Message, Task
from headrace.verify.property_result import Figure, PropertyResult
from headrace.verify.subject import ENVIRONMENT, SEED, Played, VerifySubject, luck

CONVERSATIONS = 4
ADVANTAGE_DECIMALS = 5  # data hold float32
Trained = tuple[bytes, int, float, float]  # context, token, log-prob, advantage


def check_masks(parts: VerifySubject, played: Played) -> PropertyResult:
    """Check that each sampled token of the rollouts is trained exactly once, in the context it was sampled in, with its
    log-prob and its step's advantage, and no other token is; and that conversations train the assistant's turns, by the
    model's own template."""
    expected = Counter(token for episode in played.credited for token in sampled_tokens(episode))
    actual = Counter(token for datum in played.data for token in trained_tokens(datum))
    conversations = environment_demonstrations(ENVIRONMENT, CONVERSATIONS, SEED, {})
    turns = sum(message.role == "assistant" for conversation in conversations for message in conversation)
    wrong = sum(wrong_turns(parts.renderer, parts.lm.tokenizer, conversation) for conversation in conversations)
    return PropertyResult(
        name="masks cover what was sampled",
        figures=(
            Figure(
                label="tokens of rollouts marked wrongly",
                value=float(((expected - actual) + (actual - expected)).total()),
                bound=0.0,
            ),
            Figure(label="turns of conversations marked wrongly", value=float(wrong), bound=0.0),
        ),
        detail=f"{expected.total()} sampled tokens, and {turns} assistant turns under the model's chat template",
    )


def sampled_tokens(credited: CreditedEpisode) -> Iterator[Trained]:
    """Yield the tokens that must be trained, read from the steps."""
    for step, advantage in zip(credited.scored.episode.steps, credited.advantages, strict=True):
        completion = step.completion
        for index, token in enumerate(completion.tokens.tolist()):
            context = np.concatenate([step.prompt, completion.tokens[:index]])
            yield _entry(context, token, completion.sampler_logprobs[index], advantage)


def trained_tokens(datum: Datum) -> Iterator[Trained]:
    """Yield the tokens that would be trained, read from a datum."""
    arrays = datum.arrays
    for index in np.flatnonzero(arrays["weights"]).tolist():
        logprob, advantage = arrays["sampler_logprobs"][index], arrays["advantages"][index]
        yield _entry(datum.inputs[: index + 1], int(datum.targets[index]), logprob, advantage)


def _entry(context: npt.NDArray[np.int32], token: int, logprob: float, advantage: float) -> Trained:
    return context.astype(np.int32).tobytes(), token, float(logprob), round(float(advantage), ADVANTAGE_DECIMALS)


def wrong_turns(renderer: Renderer, tokenizer: Any, conversation: Sequence[Message]) -> int:
    """Count assistant turns that are not marked from the end of their prompt to their end-of-turn token."""
    runs = [run for rendered in renderer.conversation(conversation) for run in marked_runs(rendered)]
    replies = [index for index, message in enumerate(conversation) if message.role == "assistant"]
    wrong = abs(len(runs) - len(replies))
    for (before, run), index in zip(runs, replies, strict=False):
        starts = before == renderer.prompt(conversation[:index]).tolist()
        has_text = _without_spaces(tokenizer.decode(run[:-1])).endswith(_without_spaces(conversation[index].content))
        ends = run[-1] in renderer.eos_tokens
        wrong += not (starts and has_text and ends)
    return wrong


def marked_runs(rendered: Rendered) -> list[tuple[list[int], list[int]]]:
    """Return every unbroken run of marked tokens, with all tokens before it."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], rendered.trained.astype(np.int8), [0]])))
    tokens = rendered.tokens.tolist()
    return [(tokens[:start], tokens[start:end]) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def _without_spaces(text: str) -> str:
    return "".join(text.split())


def check_groups(parts: VerifySubject, played: Played) -> PropertyResult:
    """Check that groups which end in reverse order keep their task and episodes, and are compared within themselves."""
    strayed = sum(misplaced_episodes(group, played.drawn) for group in played.groups)
    misjudged = sum(not _has_right_advantages(episode, played.groups) for episode in played.credited)
    return PropertyResult(
        name="groups keep their identity",
        figures=(
            Figure(label="episodes in another task's group", value=float(strayed), bound=0.0),
            Figure(label="episodes compared with another group", value=float(misjudged), bound=0.0),
        ),
        detail=f"{len(played.credited)} episodes of {len(played.groups)} groups that ended in reverse",
    )


def misplaced_episodes(group: Group, drawn: Sequence[Task]) -> int:
    """Count episodes that are not of the task the group was started for, or have another episode's reward."""
    return sum(
        scored.episode.task.id != drawn[group.id].id
        or scored.episode.id.split("/")[0] != str(group.id)
        or scored.reward.total != luck(scored.episode.id)
        for scored in group.episodes
    )


def _has_right_advantages(credited: CreditedEpisode, groups: Sequence[Group]) -> bool:
    """Check that the advantages are the reward minus the mean of the group that the episode's id names."""
    group_id = credited.scored.episode.id.split("/")[0]
    rewards = [luck(s.episode.id) for group in groups for s in group.episodes if s.episode.id.split("/")[0] == group_id]
    expected = luck(credited.scored.episode.id) - sum(rewards) / len(rewards)
    return str(credited.group_id) == group_id and bool(np.allclose(credited.advantages, expected, rtol=0, atol=1e-9))
