"""An OpenAI-compatible endpoint in front of any sampler, for agent programs that call the model themselves."""

from headrace.infer.endpoint.app import Endpoint
from headrace.infer.endpoint.record import EpisodeRecord
from headrace.infer.endpoint.server import serve

__all__ = ["Endpoint", "EpisodeRecord", "serve"]
