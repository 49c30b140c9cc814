"""Training requests: accepted, ordered per model, executed exactly once.

- `training_requests`: check, journal and queue a request.
- `operations`: the operations of a model, parsed from bodies.
- `model_queue`: the requests of one model, by sequence number.
- `training_queue`: run requests, models taking turns.
- `training_execution`: execute one operation on the host.
- `server_gae`: advantages computed on the server.
- `request_metrics`: figures of a request besides those of its loss.
- `model_creation`: create models within quotas.
- `model_states`: save and restore the state behind a model's updates.
"""
