"""Rollouts: play episodes and groups, publish weights to samplers, and schedule it all.

- `episode.py` runs one episode; `agent_program.py` runs a program that calls the model itself.
- `policies.py` acts in an episode, with a sampler or a remote chat model.
- `group.py` plays a group of episodes from identical starts; `filters.py` decides whether it is worth training on.
- `partial_rollout.py` keeps what running episodes have sampled, so that they can be interrupted and resumed.
- `next_logprobs.py` scores sampled tokens under the next version; `publisher.py` makes versions.
- `group_json.py` encodes groups for checkpoints; `episode_log.py` logs episodes step by step.
- `executor/` plays groups within the staleness bound and hands them to the trainer in batches.
"""
