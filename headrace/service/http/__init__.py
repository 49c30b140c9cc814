"""HTTP: routes, JSON schemas, keys and limits.

- `app`: the routes of the public tinker SDK.
- `management`: training runs, checkpoints, sessions, queues and metrics.
- `completions`, `openai_responses`: OpenAI's chat and text completions.
- `evaluation_routes`: evaluate a policy, compare two.
- `schemas`, `evaluation_schemas`: pydantic models of bodies; `forward_body`: that of `forward_backward` in JSON.
- `auth`: API keys, rate limits, quotas.
- `middleware`: error responses; keys and sizes, checked before bodies are read.
- `connections`: deadlines of connections, and their number.
- `prometheus_metrics`: GET /metrics.
- `server`: serve an application on a socket.
"""
