"""The families of models: a model_type of config.json and the class that loads it.

This imports no torch, which takes seconds. A multimodal type has the class of its text model.
"""

FAMILIES = {
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "gemma3_text": "Gemma3",
    "glm4": "Glm4",
    "granite": "Granite",
    "llama": "Llama",
    "ministral": "Ministral",
    "ministral3": "Ministral3",
    "mistral": "Mistral",
    "mistral3": "Mistral",
    "mixtral": "Mixtral",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "phi3": "Phi3",
    "qwen2": "Qwen2",
    "qwen2_moe": "Qwen2Moe",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "seed_oss": "SeedOss",
    "smollm3": "SmolLM3",
}
