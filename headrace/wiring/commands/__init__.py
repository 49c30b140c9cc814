"""The commands of the CLI.

- `train`: run the stages of a configuration.
- `eval`: play held-out tasks, and write demonstrations.
- `experiments`: compare checkpoints, runs, and the settings of a sweep.
- `demo`, `verify`, `explain`, `doctor`, `recredit`: the commands of these names.
- `explain_samples`: show the first training example, prompt and reward call, for `explain`.
- `export`: copy a checkpoint's model or adapter for other programs, or to the hub.
- `cluster_plan`: say where the processes of a run would be placed.
- `serve`, `serve_references`: a training service, and the frozen models of its serve.toml.
"""
