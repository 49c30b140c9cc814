"""Run the model of a stage, in this process or at a service.

- `protocol`: the `Runtime` protocol.
- `local`: trains and samples in this process, on one compute thread.
- `colocated`: lets trainer and inference servers use the same GPUs in turns.
- `engine_replicas`: samples in engine processes beside the run.
- `ranks`: trains on several ranks and samples on the first.
- `service`: trains and samples at a training service, over HTTP.
"""
