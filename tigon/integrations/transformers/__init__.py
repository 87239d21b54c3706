"""Tigon's models as transformers' `PreTrainedModel`s, for its Trainer, TRL, PEFT and pipelines."""
