"""An OpenAI-compatible API in front of any sampler, for agent programs that call the model themselves.

- `wire.py` parses chat requests and defines `ApiError`; `text.py` has text completions, requests and replies.
- `record.py` turns the messages of one episode into tokens and records every call.
- `replies.py` writes chat replies, whole or streamed; `live.py` streams text while it is being sampled.
- `app.py` has the routes, and `server.py` opens the socket.
"""

from headrace.infer.endpoint.app import Endpoint
from headrace.infer.endpoint.record import EpisodeRecord
from headrace.infer.endpoint.server import serve

__all__ = ["Endpoint", "EpisodeRecord", "serve"]
