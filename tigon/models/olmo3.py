"""OLMo 3: OLMo 2 with three sliding layers to a full one, and RoPE scaling in the full ones only.

Checked against transformers' modeling_olmo3. It reads a config's `rope_theta` for full layers
alone: sliding ones rotate with 5e5 unless `rope_parameters` says otherwise.
"""

from dataclasses import dataclass

from tigon.models._blocks import PostNormBlock
from tigon.models._config import TwoRopesConfig
from tigon.models.causal_lm import CausalLM
from tigon.models.olmo2 import Olmo2Config


@dataclass(frozen=True, kw_only=True)
class Olmo3Config(Olmo2Config, TwoRopesConfig):
    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    default_theta = 5e5

    def slides(self, layer: int) -> bool:
        return (layer + 1) % 4 != 0


class Olmo3(CausalLM):
    config_class = Olmo3Config
    block_class = PostNormBlock
