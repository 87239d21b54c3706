"""Trains transformers' model and Tigon's under torchrun, and prints the losses of both."""

import json
import os
import sys
from pathlib import Path

from tests.integrations.transformers.peers import losses, train
from tests.models.tiny import load_reference
from tigon.integrations.transformers import from_pretrained

if __name__ == "__main__":
    checkpoint, directory = map(Path, sys.argv[1:])
    both = []
    for load in (load_reference, from_pretrained):
        model = load(checkpoint)
        model.config.output_router_logits = True
        settings = {"ddp_backend": "gloo", "max_steps": 6, "activation_checkpointing": True}
        both.append(losses(train(model, directory / load.__name__, **settings)))
    if os.environ["RANK"] == "0":
        (directory / "losses.json").write_text(json.dumps(both))
