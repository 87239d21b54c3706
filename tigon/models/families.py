"""The families, one line each: the registry, `tigon.__all__` and README's table list these."""

from tigon.models.deepseek_v3 import DeepseekV3 as DeepseekV3
from tigon.models.gemma import Gemma as Gemma
from tigon.models.gemma2 import Gemma2 as Gemma2
from tigon.models.gemma3 import Gemma3 as Gemma3
from tigon.models.gemma4 import Gemma4 as Gemma4
from tigon.models.gemma4 import Gemma4Unified as Gemma4Unified
from tigon.models.glm4 import Glm4 as Glm4
from tigon.models.glm4_moe_lite import Glm4MoeLite as Glm4MoeLite
from tigon.models.gpt_oss import GptOss as GptOss
from tigon.models.granite import Granite as Granite
from tigon.models.llama import Llama as Llama
from tigon.models.ministral3 import Ministral3 as Ministral3
from tigon.models.mistral import Ministral as Ministral
from tigon.models.mistral import Mistral as Mistral
from tigon.models.mistral4 import Mistral4 as Mistral4
from tigon.models.mixtral import Mixtral as Mixtral
from tigon.models.muse_glimmer import MuseGlimmer as MuseGlimmer
from tigon.models.olmo2 import Olmo2 as Olmo2
from tigon.models.olmo3 import Olmo3 as Olmo3
from tigon.models.phi3 import Phi3 as Phi3
from tigon.models.qwen2 import Qwen2 as Qwen2
from tigon.models.qwen2_moe import Qwen2Moe as Qwen2Moe
from tigon.models.qwen3 import Qwen3 as Qwen3
from tigon.models.qwen3_moe import Qwen3Moe as Qwen3Moe
from tigon.models.seed_oss import SeedOss as SeedOss
from tigon.models.smollm3 import SmolLM3 as SmolLM3
