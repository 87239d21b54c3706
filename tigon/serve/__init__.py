"""A server that speaks OpenAI's protocol: continuous batching over one static cache."""

from tigon.serve.answer import Answer
from tigon.serve.engine import Engine, QueueFullError

__all__ = ["Answer", "Engine", "QueueFullError"]
