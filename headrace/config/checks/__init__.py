"""Check a configuration before anything is loaded; every problem is one sentence that says what to write.

- `run_config`: the whole file of a run (`check`).
- `async_rl`: `[rl.async]` and `[rl.correction]`.
- `cluster`: `[cluster]`.
- `colocation`: `cluster.colocate`.
- `credit_rules`: how `[rl]` rewards episodes and credits their steps.
- `engine_servers`: servers in `[engine]`.
- `metric_sinks`: `[metrics]`.
- `stage_length`: `steps` and `epochs` of the stages.
- `service_runs`: runs whose model is trained at a service.
- `vision`: `model.vision`, and runs whose data have pictures.
- `windows`: what needs Linux or macOS.
"""
