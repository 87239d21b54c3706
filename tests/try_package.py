"""Tries an installed Tigon where only its dependencies are: `python -P tests/try_package.py`.

`make package` runs it in a fresh environment. It imports nothing of the checkout.
"""

import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch

import tigon

LLAMA = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def main() -> None:
    """Raises an error for the first thing that does not work."""
    assert "site-packages" in str(Path(tigon.__file__)), f"{tigon.__file__} is a checkout"
    assert tigon.__version__ == version("tigon")
    torch.manual_seed(0)
    model = tigon.Llama.from_config(LLAMA)
    ids = torch.randint(64, (2, 16))
    before, after = train(model, ids)
    assert after < before
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        again = tigon.from_pretrained(directory)
        said = tigon_command("plan", directory, "--gpus", "8", "--seq-len", "512")
        assert "tok/s/GPU" in said, said
    tokens = model.generate(ids, max_new_tokens=4)
    assert torch.equal(tokens, again.generate(ids, max_new_tokens=4))
    assert tigon_command("--version") == f"tigon {version('tigon')}\n"
    print(tigon_command("info").splitlines()[0], f"· loss {before:.3f} -> {after:.3f}")


def train(model: tigon.Llama, ids: torch.Tensor) -> tuple[float, float]:
    """Returns the loss before and after a few steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(4):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0], losses[-1]


def tigon_command(*arguments: str) -> str:
    command = [str(Path(sys.executable).parent / "tigon"), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
