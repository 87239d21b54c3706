"""OLMo 3: OLMo 2 with three sliding-window layers per full one, and RoPE scaling in the full ones.

Checked against transformers' modeling_olmo3. It reads a config's `rope_theta` for full layers
alone: sliding ones rotate with 5e5 unless `rope_parameters` says otherwise.
"""

from dataclasses import dataclass

from tigon.models.config import TwoRopesConfig
from tigon.models.olmo2 import Olmo2, Olmo2Config


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(Olmo2Config, TwoRopesConfig):
    """The config of OLMo 3: OLMo 2's with sliding windows and two RoPEs."""

    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    default_theta = 5e5
    full_every = 4


class Olmo3(Olmo2):
    """OLMo 3: a decoder of `Olmo2Block`s."""

    config_class = Olmo3Config
