"""Rewards: functions of a finished episode, and the runner that calls them and adds up their results.

- `terms`: a reward function as a weighted term of the sum, and the functions that come with the package.
- `reward_runner`: calls every term for the episodes of a group, and adds up their rewards.
- `call_scheduler`: calls functions of this process on threads or the event loop, with a time limit each.
- `reward_health`: warns once of rewards that cannot teach: all equal, never above 0, all unknown.
- `truncation`: the reward of an episode that a limit cut off.
- `judge`: a language model that scores episodes by a rubric.
- `remote_term`: a reward that a server computes.
- `user_term`: a user's function as a term, in the sandbox or in this process.
- `user_function`: loads a user's function, recognises its signature and calls it. Standard library only.
- `episode_json`: an episode as JSON, on its way into the sandbox.
- `raised`: describes what a function raised: file and line, and what the sandbox forbade. Standard library only.
- `result`: parses and checks what a function returned. Standard library only.
- `alignment`: makes a Reward of a checked result, with the rewards of single steps on their steps.
- `format`: the reward "format", a regular expression that runs in the sandbox. Standard library only.
- `builtin/`: rewards that read the last answer: math, numbers, choices, programs, JSON, patterns.
- `compat/`: stand-ins for the packages reward-kit and eval-protocol.
- `sandbox/`: isolated worker processes for users' functions.
"""
