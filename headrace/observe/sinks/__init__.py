"""Metric sinks: each satisfies `protocols.MetricSink` and belongs to one stage of a run.

- `jsonl`: metrics.jsonl, the record of truth.
- `tee`: several sinks at once; optional sinks that may fail.
- `progress`: the progress line on a terminal.
- `tensorboard`, `wandb`, `trackio`, `mlflow`, `prometheus`, `datadog`: other systems.
- `gpu`: GPU utilisation and memory, added to the metrics.
- `training_health`: warnings of a loss that diverged and of a policy that collapsed.
- `alerts`, `webhook`: rules on metrics, and messages posted when they hold.
"""
