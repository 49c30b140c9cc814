"""An OpenAI-compatible API in front of any sampler, for agent programs that call the model themselves.

- `wire.py` parses chat requests and defines `ApiError`; `text.py` has text completions, requests and replies.
- `record.py` turns the messages of one episode into tokens and records every call.
- `replies.py` writes chat replies, whole or streamed; `live.py` streams text while it is being sampled.
- `app.py` has the routes, and `server.py` opens the socket.
"""

from headrace.infer.openai_api.app import OpenAIEndpoint
from headrace.infer.openai_api.server import serve
from headrace.infer.openai_api.session import ChatSession

__all__ = ["ChatSession", "OpenAIEndpoint", "serve"]
