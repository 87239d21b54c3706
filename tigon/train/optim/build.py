"""The optimizer of a run."""

import torch
from torch import nn

from tigon.train.config import Config
from tigon.train.optim.groups import parameter_groups


def build_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    betas = (config.beta1, config.beta2)
    groups = parameter_groups(model, config)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.eps, fused=True)
