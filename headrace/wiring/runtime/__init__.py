"""Where the model of a stage is trained and sampled.

- `protocol`: the `Runtime` protocol.
- `local`: in this process, on one compute thread.
- `service`: at a training service, over HTTP.
"""
