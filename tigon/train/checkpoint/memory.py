"""How much host memory there is left."""

import os
from pathlib import Path

from tigon.train.parallel import World
from tigon.utils.memory import CGROUP


def available(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> int:
    """Bytes that this process may still take; where nobody says, more than any machine has."""
    found = [1 << 60]
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        if "MemAvailable" in lines:
            found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
            used = int((cgroup / "memory.current").read_text()) - int(stat["inactive_file"])
            found.append(int(limit) - used)
    except (OSError, ValueError, KeyError):
        pass  # no limit that can be read
    return min(found)


def fits(needed: int, world: World) -> bool:
    """Whether the host of every rank has `needed` bytes for each of its ranks, and a tenth more.

    Every rank calls this, each with its own number.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    return not world.most(1.1 * needed * local >= available())
