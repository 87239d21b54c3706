"""What `tigon train --help` prints."""

from dataclasses import fields
from typing import Any

import yaml

from tigon.train.config import SECTIONS, Config
from tigon.train.objectives import tasks
from tigon.utils.config import describe_type, field_types

USAGE = """\
tigon train config.yaml [key=value | --key value ...]
tigon train config.yaml --nproc 8 [key=value | --key value ...]
torchrun --nproc-per-node 8 -m tigon.train config.yaml [key=value | --key value ...]

  --nproc N        processes on this host, one for each GPU
  --help           this text
  --print-config   the settings as they would be used, as YAML
  --dry-run        check everything, say what the run takes, time a few steps, and stop
"""


def help_text() -> str:
    """All settings with their types and defaults, by section."""
    lines, kinds = [USAGE], field_types(Config)
    for section in SECTIONS:
        lines.append(f"{section.__doc__}")
        for f in fields(section):
            lines.append(f"  {f.name}: {describe_type(kinds[f.name])} = {_plain(f.default)}")
            lines.append(f"      {f.metadata['help']}".replace("{tasks}", tasks()))
        lines.append("")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()
