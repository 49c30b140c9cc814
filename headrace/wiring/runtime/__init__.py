"""Run the model of a stage, in this process or at a service.

- `protocol`: the `Runtime` protocol.
- `local`: trains and samples in this process, on one compute thread.
- `ranks`: trains on several ranks and samples on the first.
- `service`: trains and samples at a training service, over HTTP.
"""
