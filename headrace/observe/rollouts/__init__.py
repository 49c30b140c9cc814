"""Rollout files: the episodes of a training step as JSON lines.

- `records`: the records of a line, and reading them.
- `files`: write episodes and load them back, equal in every bit.
- `picture_files`: keep the pictures of episodes as files, each once, and show them in pages.
- `saved_episodes`: choose which episodes of a step are saved.
"""
