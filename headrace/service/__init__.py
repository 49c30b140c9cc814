"""The training service: `headrace serve`, its client, and evaluation on the server.

- `core.py` builds the parts of the service over one host and one journal, without HTTP.
- `settings.py` reads serve.toml; `telemetry.py` records metrics of models and of the server.
- `http/` has the routes, schemas, keys and limits; `wire/` converts protobuf messages.
- `requests/` follows every request and session; `training/` and `sampling/` accept, queue and execute requests.
- `store/` keeps records and checkpoints on disk.
- `host/` computes: adapters trained and sampled over one base model.
- `evaluation/` evaluates and compares policies; `reference/` is a server that only scores.
- `client/` is our own client, next to the public tinker SDK.
"""
