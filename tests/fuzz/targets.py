"""All targets by name."""

from tests.fuzz import config, weights
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target for module in (config, weights) for target in module.TARGETS
}
