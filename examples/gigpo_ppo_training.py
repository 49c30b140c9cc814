"""From raw steps to a PPO update, one stage at a time: what each hands to the next, as a small table.

    python examples/gigpo_ppo_training.py            # about a minute on one CPU core; no download

A tiny model crosses frozen lakes. It is shown how (badly) by supervised training first, because a policy that never
succeeds has nothing to compare. Then one group is followed from its raw steps to the numbers the loss sees, one
real update is made, and the rest is the same in a loop. docs/objectives.md has the formulas.
"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.algo.advantages.credit import CreditedBatch, credit
from headrace.algo.advantages.health import anchor_findings
from headrace.algo.datum import conversation_datum, to_data
from headrace.algo.loss_weights import reweight
from headrace.data.conversations import ConversationMixture
from headrace.data.task_source import TaskSource
from headrace.envs import ENVIRONMENTS, environment_demonstrations, environment_tasks
from headrace.infer.engine import EmbeddedEngine
from headrace.metrics import metric_values
from headrace.model.load import LanguageModel, prepare
from headrace.model.tiny import make_model, make_tokenizer
from headrace.render import Renderer
from headrace.reward.reward_runner import GroupRewardRunner
from headrace.reward.sandbox.pool import SandboxSettings
from headrace.reward.user_term import UserRewardSpec, sandboxed_term
from headrace.rollout.group import GroupPlayer
from headrace.rollout.publisher import Publisher
from headrace.train.torch_backend import TorchBackend
from headrace.types import CROSS_ENTROPY, Adam, Datum, ForwardOut, Group, LossSpec, SamplingParams, Task

SEED = 0
WORLD = "frozen_lake"
LAKES = {"side": 3, "holes": 2, "max_turns": 7, "min_optimal": 2}
GAMMA, OMEGA = 0.95, 1.0
PPO = LossSpec(fn="ppo", params={"clip_low": 0.2, "clip_high": 0.2})
REWARD = f"{Path(__file__).with_name('turn_rewards.py')}:evaluate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    sft_steps: int = 60
    rl_steps: int = 40
    groups: int = 16
    group_size: int = 8
    epochs: int = 2  # updates on the same data, so that the ratio of PPO comes into play
    held_out: int = 128


async def main(sizes: Sizes) -> dict[str, float]:
    """Show the stages, train, and return the share of held-out lakes that are crossed before and after."""
    lm, renderer = made_model()
    backend = TorchBackend(lm)
    imitate(backend, renderer, steps=sizes.sft_steps)
    engine = EmbeddedEngine(
        lm, max_num_seqs=sizes.groups * sizes.group_size
    )  # samples with the tensors that are trained
    publisher = Publisher([engine])
    term = sandboxed_term(UserRewardSpec(name="turns", spec=REWARD), SandboxSettings(), fork_groups=True)
    player = GroupPlayer(
        group_size=sizes.group_size,
        make_env=ENVIRONMENTS[WORLD].make_env,
        sampler=engine,
        renderer=renderer,
        reward_runner=GroupRewardRunner([term], max_invalid_share=0.1),
        sampling=SamplingParams(max_tokens=4),
        max_turns=LAKES["max_turns"],
        max_episode_tokens=192,
        timeout_s=600.0,
        run_seed=SEED,
    )
    held_out = environment_tasks(WORLD, sizes.held_out, 3, {**LAKES, "split": "held_out"})
    tasks = TaskSource(environment_tasks(WORLD, 300, 2, LAKES), SEED)
    trainer = TorchBackend(lm)  # a new stage: new optimiser state on the same weights
    try:
        before = await crossed(player, held_out)
        for step in range(sizes.rl_steps):
            first = step == 0
            ids = range(step * sizes.groups, (step + 1) * sizes.groups)
            groups = await asyncio.gather(*(player(tasks.next(), id) for id in ids))  # task -> rollout -> reward
            credited = credit(groups, method="gigpo", params={"gamma": GAMMA, "omega": OMEGA})  # reward -> advantage
            data = reweight(to_data(credited.episodes), weighting="token_mean")  # advantage -> datum
            if first:
                show_stages(groups, credited, data, renderer)
                check_anchors(credited)
            outs = [update(trainer, data) for _ in range(sizes.epochs)]  # datum -> loss -> optimiser
            if first:
                show_update(outs, trainer.forward(data, PPO).result())
            async with publisher.publish(trainer.export_weights().result()):  # -> version + 1
                pass
            print(f"step {step + 1:3d}  crossed {success(groups):5.1%}  loss {outs[0].loss:+.4f}")
        after = await crossed(player, held_out)
    finally:
        await term.close()
        for closing in (engine, backend, trainer):
            closing.close()
    print(f"\nheld-out lakes crossed: {before:.1%} before, {after:.1%} after {sizes.rl_steps} steps")
    return {"before": before, "after": after}


def made_model() -> tuple[LanguageModel, Renderer]:
    tokenizer = make_tokenizer(ENVIRONMENTS[WORLD].vocabulary())
    model = make_model(vocab_size=len(tokenizer), width=64, layers=2, heads=4, kv_heads=2, context=192, seed=SEED)
    lm = prepare(model, tokenizer, source="made on the spot")
    return lm, Renderer(tokenizer, eos_tokens=lm.eos_tokens)


def imitate(backend: TorchBackend, renderer: Renderer, *, steps: int) -> None:
    """Supervised training on a player that is wrong half of the time."""
    shown = ConversationMixture(
        [(environment_demonstrations(WORLD, 300, 1, {**LAKES, "mistake_rate": 0.5}), 1.0)], SEED
    )
    for _ in range(steps):
        parts = [part for talk in shown.next_batch(32) for part in renderer.conversation(talk, max_tokens=192)]
        data = reweight([conversation_datum(part.tokens, part.trained) for part in parts], weighting="token_mean")
        backend.forward_backward(data, CROSS_ENTROPY)
        backend.optim_step(Adam(learning_rate=3e-3)).result()


def update(trainer: TorchBackend, data: Sequence[Datum]) -> ForwardOut:
    forward = trainer.forward_backward(data, PPO)
    trainer.optim_step(Adam(learning_rate=1e-3))
    return forward.result()


async def crossed(player: GroupPlayer, tasks: Sequence[Task]) -> float:
    """Play one episode of each task, always by the same seeds."""
    once = replace(player, group_size=1)
    groups = await asyncio.gather(*(once(task, 1_000_000 + n) for n, task in enumerate(tasks)))
    return success(groups)


def success(groups: Sequence[Group]) -> float:
    verdicts = [bool(scored.success) for group in groups for scored in group.episodes]
    return sum(verdicts) / max(len(verdicts), 1)


def check_anchors(credited: CreditedBatch) -> None:
    """What a run does before it trains: an anchor that never changes would make of GiGPO a slower GRPO."""
    found = anchor_findings(credited.table, method="gigpo")
    assert not found.errors, found.errors


# --- what the stages hand on -----------------------------------------------------------------------------------------


def show_stages(groups: Sequence[Group], credited: CreditedBatch, data: Sequence[Datum], renderer: Renderer) -> None:
    """One group in which some episodes succeeded and others did not, from its raw steps to the data of the loss."""
    differing = [n for n, group in enumerate(groups) if sum(bool(e.success) for e in group.episodes) > 0]
    chosen = groups[differing[0] if differing else 0]
    mine = [episode for episode in credited.episodes if episode.group_id == chosen.id]
    best = max(mine, key=lambda episode: episode.scored.reward.total)
    title("1. Raw steps: what the environment saw, token for token")
    row("state", "prompt", "sampled", "action", "valid", "log-prob")
    for step in best.scored.episode.steps:
        logprob = float(step.completion.sampler_logprobs.sum())
        row(step.state, len(step.prompt), len(step.completion.tokens), step.action, step.valid, f"{logprob:.2f}")

    title("2. Scored: the reward function saw messages; its step outputs are aligned to steps")
    row("episode", "turns", "crossed", "R", "r_t")
    for episode in mine:
        scored = episode.scored
        steps = " ".join(f"{value:+.2f}" for value in scored.reward.steps or ())
        row(scored.episode.id, len(episode.advantages), bool(scored.success), f"{scored.reward.total:+.2f}", steps)

    title("3. Anchor states: steps of the group that were taken in the same state are peers")
    row("state", "peers", "what was done there, with the return G from there on")
    met: dict[str, list[str]] = {}
    for episode in mine:
        for step, part in zip(episode.scored.episode.steps, episode.parts or (), strict=True):
            met.setdefault(str(part.anchor), []).append(f"{step.action} {part.returns:+.2f}")
    for state, done in sorted(met.items(), key=lambda item: -len(item[1]))[:6]:
        row(state, len(done), ", ".join(done[:5]) + (", ..." if len(done) > 5 else ""))

    title(f"4. Advantages: A = A_E + {OMEGA:g} A_S, gamma = {GAMMA:g}")
    row("state", "action", "G", "A_E", "A_S", "A")
    for step, part, advantage in zip(best.scored.episode.steps, best.parts or (), best.advantages, strict=True):
        row(step.state, step.action, *(f"{x:+.3f}" for x in (part.returns, part.episode, part.step, advantage)))

    datum = data[next(n for n, episode in enumerate(credited.episodes) if episode is best)]
    title("5. Datum: position t predicts token t + 1; only sampled tokens have a weight")
    row("t", "token", "weight", "advantage", "log-prob", "version")
    sampled = [t for t in range(datum.num_tokens) if datum.arrays["weights"][t]][:6]
    around = [t for t in range(datum.num_tokens) if any(abs(t - other) <= 1 for other in sampled)]
    for t in around:
        word = renderer.decode(datum.targets[t : t + 1]) or "<end>"
        numbers = [f"{datum.arrays[name][t]:.4f}" for name in ("weights", "advantages", "sampler_logprobs")]
        row(t, word, *numbers, int(datum.arrays["versions"][t]))
        if t + 1 not in around:
            row("...")


def show_update(outs: Sequence[ForwardOut], after: ForwardOut) -> None:
    title("6. The PPO loss before and after real updates on these data")
    names = sorted(name for name in metric_values(after.metrics) if name.startswith("loss/"))
    row("", *(f"before {n + 1}" for n in range(len(outs))), "after")
    for name in names:
        row(name, *(f"{metric_values(out.metrics)[name]:+.5f}" for out in (*outs, after)))
    title("7. The same, step after step")


def title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")


def row(*cells: object) -> None:
    print("  ".join(f"{cell!s:<18}" if n == 0 else f"{cell!s:>9}" for n, cell in enumerate(cells)).rstrip())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sft-steps", type=int, default=Sizes().sft_steps)
    parser.add_argument("--rl-steps", type=int, default=Sizes().rl_steps)
    given = parser.parse_args()
    asyncio.run(main(Sizes(sft_steps=given.sft_steps, rl_steps=given.rl_steps)))
