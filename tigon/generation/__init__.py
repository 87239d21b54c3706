"""From a prompt to its continuation: settings, sampling, caches, CUDA graphs, speculation."""

from tigon.generation.generate import generate
from tigon.generation.loop import StopStrings
from tigon.generation.output import GenerationOutput
from tigon.generation.prompt import DecodingTokenizer, GenerationModel, Streamer
from tigon.generation.sampling import Sampling
from tigon.generation.settings import check_generation_config

__all__ = [
    "DecodingTokenizer", "GenerationModel", "GenerationOutput", "Sampling", "StopStrings",
    "Streamer", "check_generation_config", "generate",
]  # fmt: skip
