"""The whole line by hand: supervised fine-tuning, then reinforcement learning, over tier 1 functions only.

It is the run of `rl_arithmetic.toml` without configuration, executor, run folder, evaluation and checkpoints, and it
makes the same numbers bit for bit (a test compares them). Copy it when a loop of your own is what you need.

    python examples/by_hand.py
"""

import asyncio

from headrace.algo.advantages.credit import credit
from headrace.algo.datum import conversation_datum, to_data
from headrace.algo.loss_weights import reweight
from headrace.data.conversations import ConversationMixture
from headrace.data.task_source import TaskSource
from headrace.envs import ENVIRONMENTS, environment_demonstrations, environment_tasks
from headrace.infer.engine import EmbeddedEngine
from headrace.model.load import prepare
from headrace.model.tiny import make_model, make_tokenizer
from headrace.render import Renderer
from headrace.reward.reward_runner import InProcessRewardRunner
from headrace.reward.terms import Term, exact_match
from headrace.rollout.group import GroupPlayer
from headrace.rollout.publisher import Publisher
from headrace.train.schedule import make_schedule
from headrace.train.torch_backend import TorchBackend
from headrace.types import CROSS_ENTROPY, Adam, LossSpec, SamplingParams

SEED = 0


async def main(sft_steps: int = 160, rl_steps: int = 60) -> list[float]:
    """Train, print a line per RL step, and return the loss of every step of both stages."""
    tokenizer = make_tokenizer(ENVIRONMENTS["add"].vocabulary())
    model = make_model(vocab_size=len(tokenizer), width=96, layers=2, heads=4, kv_heads=2, context=64, seed=SEED)
    lm = prepare(model, tokenizer, source="made on the spot")
    renderer = Renderer(tokenizer, eos_tokens=lm.eos_tokens)
    losses = []

    backend = TorchBackend(lm)
    demonstrations = environment_demonstrations("add", 700, 1, {"max_number": 29, "mistake_rate": 0.5})
    mixture = ConversationMixture([(demonstrations, 1.0)], SEED)
    schedule = make_schedule(sft_steps, peak=3e-3, type="cosine", warmup_steps=10, final=0.1)
    for step in range(sft_steps):
        rendered = [part for talk in mixture.next_batch(64) for part in renderer.conversation(talk, max_tokens=64)]
        data = reweight([conversation_datum(part.tokens, part.trained) for part in rendered], weighting="token_mean")
        forward = backend.forward_backward(data, CROSS_ENTROPY)  # queued; runs while this thread goes on
        backend.optim_step(Adam(learning_rate=schedule(step)))
        losses.append(forward.result().loss)

    backend = TorchBackend(lm)  # a new stage: new optimiser state on the same weights
    engine = EmbeddedEngine(lm, max_rows=128, kv_tokens=128 * 64)  # samples with the very tensors that are trained
    publisher = Publisher([engine])
    tasks = TaskSource(environment_tasks("add", 700, 2, {"max_number": 29}), SEED)
    player = GroupPlayer(
        group_size=8,
        make_env=ENVIRONMENTS["add"].make_env,
        sampler=engine,
        renderer=renderer,
        reward_runner=InProcessRewardRunner([Term(name="exact_match", fn=exact_match)]),
        sampling=SamplingParams(max_tokens=4),
        max_turns=1,
        max_episode_tokens=32,
        timeout_s=600.0,
        run_seed=SEED,
    )
    for step in range(rl_steps):
        groups = await asyncio.gather(*(player(tasks.next(), step * 32 + i) for i in range(32)))  # task -> reward
        credited = credit(groups, method="rloo")  # reward -> advantage
        data = reweight(to_data(credited.episodes), weighting="token_mean")  # advantage -> datum
        forward = backend.forward_backward(data, LossSpec(fn="ppo"))
        backend.optim_step(Adam(learning_rate=5e-4))
        losses.append(forward.result().loss)
        async with publisher.publish(backend.export_weights().result()):  # new weights: version + 1
            pass
        right = [scored.reward.total for group in groups for scored in group.episodes]
        print(f"step {step + 1:3d}  right {sum(right) / len(right):5.1%}  version {engine.version}")
    engine.close()
    return losses


if __name__ == "__main__":
    asyncio.run(main())
