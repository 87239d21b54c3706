"""All targets by name."""

from tests.fuzz import adapters, config, runs, text, weights
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target
    for module in (adapters, config, runs, text, weights)
    for target in module.TARGETS
}
