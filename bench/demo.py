"""The demo over several seeds, and a control that spends RL's steps on more SFT instead.

Each seed runs `headrace demo`, then the same SFT with as many further steps as RL had, each on as many conversations
as an RL step has episodes. Held-out success is measured alike. The last line is JSON; `ratio` is success after RL over
success of the control.

    python bench/demo.py [--seeds 3] [--first 0]
"""

import argparse
import json
import logging
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from headrace import wiring
from headrace.config import Config


def control_of(config: Config, sft_checkpoint: str) -> Config:
    """More SFT from the demo's own SFT checkpoint, at a tenth of the peak learning rate, where its schedule ended."""
    assert config.sft is not None
    assert config.rl is not None
    optimizer = config.sft.optimizer
    after = replace(
        optimizer,
        learning_rate=optimizer.learning_rate * optimizer.schedule.final,
        schedule=replace(optimizer.schedule, type="constant", warmup_steps=0),
    )
    more = replace(
        config.sft, steps=config.rl.steps, batch_size=config.rl.groups * config.rl.group_size, optimizer=after
    )
    model = replace(config.model, path=sft_checkpoint)
    return replace(config, model=model, sft=more, rl=None, run=replace(config.run, name="control"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    given = parser.parse_args()
    logging.getLogger("headrace").setLevel(logging.ERROR)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(given.first, given.first + given.seeds):
            config = wiring.demo_config(seed=seed, folder=Path(folder))
            began = time.monotonic()
            demo = wiring.demo(seed=seed, folder=Path(folder)).figures
            seconds = time.monotonic() - began
            run = Path(demo["report"]).parent
            assert config.sft is not None
            control = control_of(config, str(run / "checkpoints" / "sft" / f"step_{config.sft.steps:06d}"))
            more = wiring.train(control, config_text_path=Path("control"), resume=None).figures
            rows.append(
                {
                    "success_sft": demo["success_sft"],
                    "malformed_sft": demo["malformed_sft"],
                    "success_rl": demo["success_rl"],
                    "success_control": more["success_sft"],
                    "seconds": seconds,
                }
            )
            print(f"seed {seed}: " + ", ".join(f"{name} {value:.3f}" for name, value in rows[-1].items()), flush=True)
    means = {name: round(statistics.mean(row[name] for row in rows), 4) for name in rows[0]}
    print(json.dumps(means | {"seeds": len(rows), "ratio": round(means["success_rl"] / means["success_control"], 2)}))


if __name__ == "__main__":
    main()
