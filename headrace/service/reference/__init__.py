"""A server of frozen models and rewards, and the client of its models.

- `scoring_app`: the HTTP application of `headrace serve --reference`.
- `reward_routes`: its reward models and reward functions.
- `scoring_client`: a frozen model at such a server.
"""
