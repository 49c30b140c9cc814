"""Environments of other packages, which are imported when an environment is first made.

- `gymnasium`: toy-text games and others with discrete actions and states.
- `textarena`: games for one player.
- `textworld`: generated text adventures, with a solver.
- `verifiers`: environments and rubrics of verifiers.
- `openenv`: environments of OpenEnv, made in this process.
- `mcp_env`: questions answered with the tools of an MCP server; `mcp_client` connects to the server.
- `optional_package`: import a package that may be missing, and make tasks from seeds or from another package's rows.
- `loop_thread`: run coroutines of asynchronous packages from plain threads.
"""
