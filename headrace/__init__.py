"""Headrace: supervised fine-tuning and reinforcement learning of language-model agents, from a laptop CPU upwards."""

__version__ = "0.2.0"
