"""A server that speaks OpenAI's protocol: continuous batching over one static cache."""

from importlib.util import find_spec

from tigon.serve.answer import Answer
from tigon.serve.engine import Engine, QueueFullError

if any(find_spec(name) is None for name in ("starlette", "uvicorn")):
    raise ImportError("the server needs Starlette and uvicorn: pip install 'tigon[serve]'")

__all__ = ["Answer", "Engine", "QueueFullError"]
