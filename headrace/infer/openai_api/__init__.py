"""OpenAI's and Anthropic's APIs in front of any sampler, for agent programs that call the model themselves.

- `chat_requests.py` parses chat requests and defines `ApiError`; `chat_responses.py` writes replies, whole or streamed.
- `responses_requests.py` turns requests of OpenAI's Responses API into chat requests; `responses_replies.py` writes its
  replies.
- `anthropic_requests.py` turns requests of Anthropic's Messages API into chat requests; `anthropic_replies.py` writes
  its replies.
- `text_completions.py` parses requests for text completions and writes their replies.
- `session.py` turns the messages of one episode into tokens and records every call.
- `streaming.py` streams text while it is being sampled.
- `app.py` has the routes, and `server.py` opens the socket.
"""

from headrace.infer.openai_api.app import OpenAIEndpoint
from headrace.infer.openai_api.server import serve
from headrace.infer.openai_api.session import ChatSession

__all__ = ["ChatSession", "OpenAIEndpoint", "serve"]
