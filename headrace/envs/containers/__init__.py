"""Environments in containers, run with the docker or podman command line.

- `command_line.py` calls docker or podman, each call with limits of time and output.
- `pool.py` starts containers at a bounded rate, and removes those that killed runs left behind.
- `harbor_tasks.py` reads task folders of the Harbor format.
- `harbor_env.py` plays such a task: commands in its container, then its tests.
"""
