"""Requests and sessions of clients.

- `request_table`: every acknowledged request, from journal entry to outcome.
- `admission`: take one more request now, or ask for it later.
- `polling`: find a request, wait for it, list and cancel.
- `sessions`: open and end sessions.
"""
