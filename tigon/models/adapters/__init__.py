"""LoRA and other adapters, and their files in the format of PEFT."""
