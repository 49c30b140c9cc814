"""Helpers of the tests; the only code that tests import besides headrace.

Of the repository
paths               Name the folders that tests read from.
examples            Run the examples in this process.
model_variants      One small model of every supported kind.
implementations     Every implementation of every protocol, for tests/contracts.

Of sampling and training
engines             Models, requests and comparisons of engines.
credit_examples     Step tables, GiGPO's worked example, and walks through states.
loss_batches        A batch with every array that a loss can ask for.
loop_fakes          Episodes, groups, a backend and a checkpoint store for the training loops.

Of rollouts
rollout_groups      Groups whose rewards and versions are given.
scripted_episodes   A sampler that says what a script says.
scripted_groups     Groups that end when the test says so.
async_rollouts      A sampler that is moved token by token, and an executor over it.
executor_sim        The executor on virtual time, with its invariants checked.
ledger_machine      The ledger under every order of events.
agent_programs      Agent programs, and samplers that keep what the engine saw.
mcp_server          A real MCP server over HTTP.
foreign/            Environments and tool servers as users of other packages write them.

Of what looks at runs
metrics_table       The figures of each loss, as docs/metrics.md says.
made_up_run         A run folder with made-up numbers and episodes.
rollout_files       Rollout files whose every number can be worked out by hand.
chromium            A real browser.

Of rewards
reward_episodes     Episodes to score.
reward_functions    Functions for the contract of reward runners.
reward_kit_files    Reward functions as people write them for other packages.
real_package        Calls of the real packages, to compare the stand-ins with.
sandbox_attacks     Reward functions that misbehave.
sandbox_modes       The users that the sandbox is tested as.

Of the service
tinker_sdk          Requests and data in the public SDK's types.
tinker_server       A service over the fake host, and clients of the public SDK.
served_model        A service over a tiny model, and our own clients.
adapter_hosts       Hosts of many adapters over one small model.
old_sdk_client      A training loop for an old release of the SDK.
cookbook            Recipes of the public tinker cookbook, offline.
forked_headrace     `headrace` commands in forked processes.
kill_points         Servers that kill themselves at a chosen call.
"""
