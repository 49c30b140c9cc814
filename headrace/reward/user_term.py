"""Make a term of a user's reward function, called in the sandbox or, if it is trusted, in this process."""

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.errors import ConfigError, HeadraceError, RewardError, boundary
from headrace.printable import single_line
from headrace.reward import user_function
from headrace.reward.alignment import Alignment, make_reward
from headrace.reward.episode_json import episode_to_row
from headrace.reward.raised import describe, sentence
from headrace.reward.sandbox.limits import CallLimits, CallResult, IsolationLayer, Outcome, isolation_gaps, may_fork
from headrace.reward.sandbox.pool import Sandbox, SandboxSettings, SandboxWorker, readable_paths, warn_once
from headrace.reward.terms import GroupTerm
from headrace.reward.user_function import RewardSignature
from headrace.types import Episode, Reward

logger = logging.getLogger(__name__)

OWN_REWARDS = "headrace.reward."  # modules of rewards that come with the package
MOST_PRINTS = 20  # texts of one function in the log
TRUSTED_CALLS = 16  # calls of one function at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class UserRewardSpec:
    """A user's reward function as it is configured."""

    name: str
    spec: str  # names the function: see `load_user_function`
    weight: float = 1.0
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # passed at every call
    alignment: Alignment = field(default_factory=Alignment)
    beyond_limits: float | None = None  # the score of an answer that takes too much CPU time or memory; None: unknown

    @property
    def target(self) -> dict[str, Any]:
        return {"spec": self.spec, "kwargs": dict(self.kwargs)}


def sandboxed_term(user: UserRewardSpec, settings: SandboxSettings, *, fork_groups: bool = False) -> GroupTerm:
    """Make a term that judges each episode in a process of its own, or each group if the function takes whole groups.

    `fork_groups`: the episodes of a group share a process, one after another. Faster for functions that take less than
    a fork, but what one episode's text makes the function do can then reach the next one's score.
    """
    sandbox, prints = Sandbox(user.target, settings), PrintLog(user.name)

    async def judge(episodes: Sequence[Episode]) -> Sequence[Reward | RewardError]:
        try:
            about = await sandbox.describe()
        except RewardError as exc:
            return [exc] * len(episodes)
        _log_notices(user, about)
        signature = signature_from(about)
        together = signature.takes_group or fork_groups
        groups = [episodes] if together else [[episode] for episode in episodes]
        alignment = _with_declared_index(user.alignment, about)
        judged = await asyncio.gather(
            *(_judge(user, sandbox, prints, group, signature, alignment, settings.limits) for group in groups)
        )
        return [reward for group in judged for reward in group]

    return GroupTerm(name=user.name, judge=judge, weight=user.weight, close=sandbox.close)


def trusted_term(user: UserRewardSpec, *, timeout_s: float = 60.0) -> GroupTerm:
    """Make a term that calls the function in this process, on a thread: no isolation, no limit but time.

    `timeout_s` limits a call from its start, not while it waits for a thread; a call that never ends keeps its thread.
    Raises ConfigError if the function cannot be imported.
    """
    with boundary(ConfigError, f"{user.spec} cannot be imported"):
        function = user_function.load(user.target)
    alignment = _with_declared_index(user.alignment, function.about)
    threads, permits = ThreadPoolExecutor(TRUSTED_CALLS, "headrace-reward"), asyncio.Semaphore(TRUSTED_CALLS)

    async def judge(episodes: Sequence[Episode]) -> Sequence[Reward | RewardError]:
        together = function.signature.takes_group
        groups = [episodes] if together else [[episode] for episode in episodes]
        judged = await asyncio.gather(*(judge_one(group) for group in groups))
        return [reward for group in judged for reward in group]

    async def judge_one(group: Sequence[Episode]) -> Sequence[Reward | RewardError]:
        rows = [episode_to_row(episode, with_tokens=function.signature.takes_tokens) for episode in group]
        async with permits:
            limit = asyncio.timeout(timeout_s)
            try:
                with boundary(RewardError, user.name):
                    async with limit:
                        loop = asyncio.get_running_loop()
                        verdicts = await loop.run_in_executor(threads, function.call, {"rows": rows})
            except RewardError as exc:
                cause = exc.__cause__
                text = str(exc) if cause is None else sentence(describe(cause), sandboxed=False)
                return [RewardError(_too_long(user, timeout_s) if limit.expired() else text)] * len(group)
        return _rewards(verdicts, group, alignment, user.name)

    return GroupTerm(name=user.name, judge=judge, weight=user.weight)


def check_importable(user: UserRewardSpec, settings: SandboxSettings) -> dict[str, Any]:
    """Start one worker and stop it, so that a broken function fails before the run. Blocks; raises ConfigError."""

    async def describe() -> dict[str, Any]:
        sandbox = Sandbox(user.target, settings)
        try:
            return await sandbox.describe()
        except RewardError as exc:
            raise ConfigError(f"reward {user.name}: {exc}") from exc
        finally:
            await sandbox.close()

    return asyncio.run(describe())


def sandbox_text() -> str:
    """Describe what the sandbox of reward functions can isolate on this machine. Blocks; raises nothing."""
    user = UserRewardSpec(name="probe", spec="headrace.reward.user_function:last_text")

    async def probe() -> frozenset[IsolationLayer]:
        worker = await SandboxWorker.start(
            SandboxSettings(), {**user.target, "alone": True}, readable_paths(user.spec, ())
        )
        await worker.stop()
        return worker.layers

    try:
        layers = asyncio.run(probe())
    except HeadraceError as exc:
        return f"does not work: {exc}"
    gaps = isolation_gaps(layers)
    cold = "" if may_fork(layers) else "; every call starts a process of its own"
    return f"{'; '.join(gaps) if gaps else 'files, network, processes and system calls are isolated'}{cold}"


async def _judge(
    user: UserRewardSpec,
    sandbox: Sandbox,
    prints: "PrintLog",
    group: Sequence[Episode],
    signature: RewardSignature,
    alignment: Alignment,
    limits: CallLimits,
) -> Sequence[Reward | RewardError]:
    try:
        with boundary(RewardError, "the task's data cannot be sent to the sandbox as JSON"):
            argument = json.loads(
                json.dumps({"rows": [episode_to_row(item, with_tokens=signature.takes_tokens) for item in group]})
            )
    except RewardError as exc:
        return [exc] * len(group)
    answer = await sandbox.call(argument)
    printed = f"{answer.stdout}{answer.stderr}".strip()
    prints.note(group[0].id, printed)
    if answer.outcome in (Outcome.CPU, Outcome.MEMORY) and user.beyond_limits is not None:
        return [Reward(total=user.beyond_limits, success=False)] * len(group)
    if answer.outcome is not Outcome.RETURNED:
        return [RewardError(failure_message(user, answer, limits))] * len(group)
    first, *others = _rewards(json.loads(answer.result), group, alignment, user.name)
    return [replace(first, printed=printed) if isinstance(first, Reward) else first, *others]


class PrintLog:
    """Logs the first texts that a reward function prints; all are in the records of the episodes."""

    def __init__(self, name: str) -> None:
        self._name, self._left = name, MOST_PRINTS

    def note(self, episode_id: str, text: str) -> None:
        if not text or not self._left:
            return
        self._left -= 1
        more = "" if self._left else " (what it prints from now on is in the saved episodes only:  headrace view)"
        logger.info("reward %s printed for episode %s: %s%s", self._name, episode_id, single_line(text, 500), more)


def _rewards(
    verdicts: object, group: Sequence[Episode], alignment: Alignment, name: str
) -> Sequence[Reward | RewardError]:
    if not isinstance(verdicts, list) or len(verdicts) != len(group):
        return [RewardError(f"what came back is not one verdict for each of {len(group)} episodes")] * len(group)
    rewards: list[Reward | RewardError] = []
    for verdict, episode in zip(verdicts, group, strict=True):
        try:
            rewards.append(make_reward(verdict, episode, alignment, term=name))
        except RewardError as exc:
            rewards.append(exc)
    return rewards


def failure_message(user: UserRewardSpec, answer: CallResult, limits: CallLimits) -> str:
    """Say in one sentence why there is no result."""
    match answer.outcome:
        case Outcome.TIMEOUT:
            return _too_long(user, limits.wall_s)
        case Outcome.CPU:
            return f"it used more than {limits.cpu_s} s of CPU time: raise rl.reward_runner.cpu_s if it needs more"
        case Outcome.MEMORY:
            return (
                f"it used more than {limits.memory_mb} MB of memory: raise rl.reward_runner.memory_mb if it needs more"
            )
        case Outcome.OUTPUT:
            return f"it printed more than {limits.output_bytes} bytes"
        case Outcome.RESULT_SIZE:
            return f"its result has more than {limits.result_bytes} bytes"
        case Outcome.CRASHED:
            return "its process crashed"
        case _:
            return answer.detail or f"it ended with {answer.outcome}"


def _too_long(user: UserRewardSpec, limit_s: float) -> str:
    remedy = "raise rl.reward_runner.wall_s if it needs more"
    if not user.spec.startswith(OWN_REWARDS):
        remedy = f"import what takes long at the top of the file, which is imported once, and {remedy}"
    return f"it took longer than {limit_s:g} s: {remedy}"


def _with_declared_index(alignment: Alignment, about: Mapping[str, Any]) -> Alignment:
    """Take the meaning of step indices from the function, if the configuration does not set it."""
    declared = about.get("step_index")
    if alignment.step_index != "auto" or declared is None:
        return alignment
    if declared not in ("message", "turn"):
        raise ConfigError(f'step_index of the reward function is {declared!r}: it must be "message" or "turn"')
    return replace(alignment, step_index=declared)


def signature_from(about: Mapping[str, Any]) -> RewardSignature:
    """Read the function's signature from its untrusted description. Raises ConfigError if it has none."""
    try:
        return RewardSignature(str(about.get("shape")))
    except ValueError as exc:
        raise ConfigError(
            "what was imported does not say how it wants to be called: it tampers with its worker"
        ) from exc


def _log_notices(user: UserRewardSpec, about: Mapping[str, Any]) -> None:
    notices = about.get("notices")
    for notice in notices if isinstance(notices, list) else ():
        warn_once(f"reward {user.name}: {notice}")
