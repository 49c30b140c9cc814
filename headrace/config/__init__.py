"""The configuration of a run: one frozen, typed tree, read from TOML with `--set section.key=value` overrides.

- `schema`: the tree of dataclasses, with the meaning of every key.
- `load_toml`: load the tree from TOML text and overrides, and turn it back into TOML.
- `aliases`: the old names of keys, still read with a warning.
- `refusals`: what other frameworks have and this one does not, refused by name.
- `foreign_names`: names of other libraries' settings, answered with ours; `framework_names`: those of the frameworks
  whose classes, functions and files are listed too.
- `lengths`: fit lengths that a file leaves out to the model.
- `presets`: the short names of `rl.algorithm`.
- `paths`: find the paths that a configuration names, and make them absolute.
- `checks/`: find what cannot work before anything is loaded (`check`).
- `introspect`: list the keys of the tree, with their types and defaults.
- `docs_table`: the table of all keys in `docs/configuration.md`.

No torch, and no I/O beyond the caller's text and `check`'s look at the paths a configuration names. Stages take values
out of the tree; below `wiring/` only what prints the tree sees it (`observe/explain_text.py`, `config/docs_table.py`).
"""

from headrace.config.checks.colocation import keeps_weights
from headrace.config.checks.run_config import check, length_problems
from headrace.config.load_toml import load_config, to_mapping
from headrace.config.paths import absolute_paths, find_path, map_paths, named_paths
from headrace.config.presets import ALGORITHMS, preset_text
from headrace.config.schema import (
    AsyncConfig,
    CheckpointConfig,
    ClusterConfig,
    Config,
    CorrectionConfig,
    CriticConfig,
    DistillConfig,
    DpoConfig,
    EngineConfig,
    EvalConfig,
    FilterConfig,
    LaunchConfig,
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
    TeacherConfig,
    TinyModelConfig,
    num_steps,
    stages_of,
)

__all__ = [
    "ALGORITHMS",
    "AsyncConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "CorrectionConfig",
    "CriticConfig",
    "DistillConfig",
    "DpoConfig",
    "EngineConfig",
    "EvalConfig",
    "FilterConfig",
    "LaunchConfig",
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
    "TeacherConfig",
    "TinyModelConfig",
    "absolute_paths",
    "check",
    "find_path",
    "keeps_weights",
    "length_problems",
    "load_config",
    "map_paths",
    "named_paths",
    "num_steps",
    "preset_text",
    "stages_of",
    "to_mapping",
]
