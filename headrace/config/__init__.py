"""The one configuration tree: frozen, typed, read from TOML with `--set section.key=value` overrides.

`load_config` reads and types it; `check` looks for what cannot work before anything is loaded. No torch, and no I/O
beyond the caller's text and `check`'s look at the paths a configuration names. Stages take values out of the tree;
below `wiring/` only what prints the tree sees it (`observe/explain.py`, `observe/key_table.py`).
"""

from headrace.config.algorithms import ALGORITHMS, algorithm_text
from headrace.config.checks import check, length_problems
from headrace.config.load import load_config, to_mapping
from headrace.config.paths import absolute_paths, find_path
from headrace.config.tree import (
    Async,
    Checkpoint,
    Config,
    Correction,
    Critic,
    Engine,
    Eval,
    Filter,
    Lora,
    Model,
    Optimizer,
    Remote,
    RewardModel,
    RewardRunner,
    RewardTerm,
    Rl,
    Run,
    Sampling,
    Schedule,
    Sft,
    Source,
    Tiny,
)

__all__ = [
    "ALGORITHMS",
    "Async",
    "Checkpoint",
    "Config",
    "Correction",
    "Critic",
    "Engine",
    "Eval",
    "Filter",
    "Lora",
    "Model",
    "Optimizer",
    "Remote",
    "RewardModel",
    "RewardRunner",
    "RewardTerm",
    "Rl",
    "Run",
    "Sampling",
    "Schedule",
    "Sft",
    "Source",
    "Tiny",
    "absolute_paths",
    "algorithm_text",
    "check",
    "find_path",
    "length_problems",
    "load_config",
    "to_mapping",
]
