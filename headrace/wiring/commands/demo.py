"""Run `headrace demo`: SFT and RL on a text environment, made on the spot, and the text about the result."""

import json
import time
from dataclasses import replace
from importlib import resources
from pathlib import Path

from headrace.config import Config, load_config
from headrace.observe.report.run_report import write_report
from headrace.wiring.commands.train import RunResult, train


def demo(*, seed: int, folder: Path) -> RunResult:
    """Train on imperfect demonstrations of a text environment, then by RL; no download. `figures` is for programs."""
    began_s = time.monotonic()
    config = demo_config(seed=seed, folder=folder)
    result = train(config, config_text_path=Path("demo.toml"), resume=None)
    seconds = time.monotonic() - began_s
    before, after = result.figures["success_sft"], result.figures["success_rl"]
    assert config.rl is not None
    figures = {
        "success_sft": before,
        "success_rl": after,
        "malformed_sft": result.figures["malformed_sft"],
        "seconds": round(seconds, 1),
        "report": str(result.report),
    }
    write_report(result.folder, {"success_sft": before, "success_rl": after, "seconds": seconds})
    text = f"""
A small model learned to find a key, unlock a door and reach a goal, in a text environment made on the spot.
Held-out rooms it has never seen, {config.eval.tasks} of them:

    after SFT on imperfect demonstrations   {before:6.1%} solved
    after RL on success alone               {after:6.1%} solved      ({seconds:.0f} s in all)

Look at it:      {result.report}
Every episode:   headrace view {result.folder}
The checkpoint:  {result.folder / "checkpoints" / "rl"} (load it with transformers' from_pretrained)
Try next:        headrace explain {result.folder / "config.toml"}
                 headrace train {result.folder / "config.toml"} --set rl.credit=dr_grpo --set run.name=dr_grpo
                 docs/tour.md follows one prompt through the whole code
"""
    return replace(result, text=text, figures=figures)


def demo_config(*, seed: int, folder: Path) -> Config:
    text = resources.files("headrace").joinpath("demo.toml").read_text(encoding="utf-8")
    overrides = [f"run.seed={seed}", f"run.folder={json.dumps(str(folder))}"]
    return load_config(text, file="demo.toml", overrides=overrides)
