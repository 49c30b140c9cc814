"""A server that only scores under frozen models, and its client.

- `scoring_app`: the HTTP application of `headrace serve --reference`.
- `scoring_client`: a frozen model at such a server.
"""
