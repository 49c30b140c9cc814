"""The one configuration tree: frozen, typed, read from TOML with `--set section.key=value` overrides.

`load_config` reads and types it; `check` looks for what cannot work before anything is loaded. No torch, and no I/O
beyond the caller's text and `check`'s look at the paths a configuration names. Stages take values out of the tree;
below `wiring/` only what prints the tree sees it (`observe/explain_text.py`, `config/docs_table.py`).
"""

from headrace.config.checks.run_config import check, length_problems
from headrace.config.load_toml import load_config, to_mapping
from headrace.config.paths import absolute_paths, find_path
from headrace.config.presets import ALGORITHMS, preset_text
from headrace.config.schema import (
    AsyncConfig,
    CheckpointConfig,
    Config,
    CorrectionConfig,
    CriticConfig,
    EngineConfig,
    EvalConfig,
    FilterConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    RemoteConfig,
    RewardModelConfig,
    RewardRunnerConfig,
    RewardTermConfig,
    RlConfig,
    RunConfig,
    SamplingConfig,
    ScheduleConfig,
    SftConfig,
    SourceConfig,
    TinyModelConfig,
)

__all__ = [
    "ALGORITHMS",
    "AsyncConfig",
    "CheckpointConfig",
    "Config",
    "CorrectionConfig",
    "CriticConfig",
    "EngineConfig",
    "EvalConfig",
    "FilterConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RemoteConfig",
    "RewardModelConfig",
    "RewardRunnerConfig",
    "RewardTermConfig",
    "RlConfig",
    "RunConfig",
    "SamplingConfig",
    "ScheduleConfig",
    "SftConfig",
    "SourceConfig",
    "TinyModelConfig",
    "absolute_paths",
    "check",
    "find_path",
    "length_problems",
    "load_config",
    "preset_text",
    "to_mapping",
]
