"""From a prompt to its continuation: settings, sampling, caches, CUDA graphs, speculation."""

from tigon.generation.api import generate
from tigon.generation.protocols import Decodes, Model, Streamer
from tigon.generation.sampling import Sampling
from tigon.generation.settings import check_generation_config
from tigon.generation.stopping import StopStrings

__all__ = [
    "Decodes",
    "Model",
    "Sampling",
    "StopStrings",
    "Streamer",
    "check_generation_config",
    "generate",
]
