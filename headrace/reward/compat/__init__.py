"""Stand-ins for the packages reward-kit and eval-protocol, so that reward functions written for them run unmodified.

- `reward_kit`: makes the packages' names importable where they are not installed; decorators.
- `models`: the pydantic types that such functions take and return.
"""
