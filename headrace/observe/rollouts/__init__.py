"""Rollout files: the episodes of a training step as JSON lines.

- `records`: the records of a line, and reading them.
- `files`: write episodes and load them back, equal in every bit.
- `saved_episodes`: choose which episodes of a step are saved.
"""
