"""The whole line by hand: supervised fine-tuning, then reinforcement learning, with the public names of `headrace`.

    python examples/by_hand.py                                      # a small model learns to add; about a minute
    python examples/by_hand.py --model FOLDER --data tasks.jsonl --reward my_reward.py:function

FOLDER is a Hugging Face folder; a row of the file has a `prompt` (or `messages`) and an `answer`. Without arguments
both are made on the spot. Copy this file when a loop of your own is what you need. It computes what this configured run
computes, without executor, run folder, evaluation and checkpoints, and its losses are the same bit for bit (a test
compares them):

    [model]
    path = "FOLDER"

    [sft]
    steps = 100
    batch_size = 64
    max_tokens = 256
    sources = [{ type = "jsonl", path = "tasks.jsonl" }]
    optimizer = { learning_rate = 3e-3 }

    [rl]
    steps = 60
    groups = 32
    group_size = 8
    max_prompt_tokens = 128
    max_episode_tokens = 256
    credit = "rloo"
    tasks = { type = "jsonl", path = "tasks.jsonl" }
    rewards = [{ fn = "exact_match" }]
    sampling = { max_tokens = 8 }
    optimizer = { learning_rate = 5e-4 }

    [engine]
    max_num_seqs = 128
"""

import argparse
import asyncio
import json
import random
import tempfile
from pathlib import Path

import headrace as hr

GROUPS = 32  # tasks of one RL step


def train_supervised(
    lm: hr.LanguageModel, rows: list[dict[str, str]], *, steps: int, learning_rate: float
) -> list[float]:
    """Imitate the answers of the rows; returns the loss of every step."""
    renderer = hr.Renderer(lm.tokenizer, lm.eos_tokens)
    conversations = hr.ConversationMixture([(hr.conversations_from_rows(rows), 1.0)])
    backend = hr.TorchBackend(lm)
    losses = []
    for _ in range(steps):
        batch = conversations.next_batch(64)
        rendered = [part for talk in batch for part in renderer.conversation(talk, max_tokens=256)]
        data = hr.reweight([hr.conversation_datum(part.tokens, part.trained) for part in rendered])
        forward = backend.forward_backward(data, hr.LossSpec(fn="cross_entropy"))  # queued; this thread goes on
        backend.optim_step(hr.Adam(learning_rate=learning_rate))
        losses.append(forward.result().loss)
    backend.close()
    return losses


async def train_reinforced(
    lm: hr.LanguageModel, rows: list[dict[str, str]], *, reward: str, steps: int, learning_rate: float
) -> list[float]:
    """Reinforce what the reward likes, print a line per step, and return the loss of every step."""
    engine = hr.EmbeddedEngine(lm, max_num_seqs=128)  # samples with the very tensors that are trained
    backend = hr.TorchBackend(lm)  # a new optimiser state on the same weights
    publisher = hr.Publisher([engine])
    tasks = hr.TaskSource(hr.tasks_from_rows(rows))
    player = hr.GroupPlayer(
        group_size=8,
        make_env=hr.SingleTurnEnv,
        sampler=engine,
        renderer=hr.Renderer(lm.tokenizer, lm.eos_tokens),
        reward_runner=hr.InProcessRewardRunner([reward]),
        sampling=hr.SamplingParams(max_tokens=8),
        max_episode_tokens=256,
    )
    losses = []
    for step in range(steps):
        first = step * GROUPS
        groups = await asyncio.gather(*(player(tasks.next(), first + i) for i in range(GROUPS)))  # task -> reward
        credited = hr.credit(groups, method="rloo")  # reward -> advantage
        data = hr.reweight(hr.to_data(credited.episodes))  # advantage -> datum
        forward = backend.forward_backward(data, hr.LossSpec(fn="ppo"))
        backend.optim_step(hr.Adam(learning_rate=learning_rate))
        losses.append(forward.result().loss)
        async with publisher.publish(backend.export_weights().result()):  # new weights: version + 1
            pass
        rewards = [scored.reward.total for group in groups for scored in group.episodes]
        print(f"step {step + 1:3d}  mean reward {sum(rewards) / len(rewards):.3f}  version {engine.version}")
    engine.close()
    backend.close()
    return losses


def main(
    model: Path, data: Path, *, reward: str = "exact_match", sft_steps: int = 100, rl_steps: int = 60
) -> list[float]:
    """Train the model of a folder on the rows of a file; returns the loss of every step of both stages."""
    lm = hr.load_model(model)
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    supervised = train_supervised(lm, rows, steps=sft_steps, learning_rate=3e-3)
    reinforced = train_reinforced(lm, rows, reward=reward, steps=rl_steps, learning_rate=5e-4)
    return [*supervised, *asyncio.run(reinforced)]


def make_model(folder: Path) -> Path:
    """Write a small Llama that has never seen a sum, with one token per character."""
    hr.save_tiny(folder, words="0123456789+=", layers=2, context=256)
    return folder


def make_data(file: Path) -> Path:
    """Write 700 sums, such as {"prompt": "1 2 + 3 9 =", "answer": "5 1"}."""
    pairs = random.Random(0).sample([(a, b) for a in range(30) for b in range(30)], 700)
    rows = [{"prompt": " ".join(f"{a}+{b}="), "answer": " ".join(str(a + b))} for a, b in pairs]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Supervised fine-tuning, then reinforcement learning.")
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; default: a small model made on the spot")
    parser.add_argument("--data", type=Path, help="a JSONL file; default: sums made on the spot")
    parser.add_argument("--reward", default="exact_match", help='a built-in reward, or "file.py:function"')
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        main(
            arguments.model or make_model(Path(folder) / "model"),
            arguments.data or make_data(Path(folder) / "sums.jsonl"),
            reward=arguments.reward,
        )
