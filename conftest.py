"""Which files' examples cannot run here: integrations whose trainer is not installed."""

import importlib.util

TRAINERS = ("accelerate", "lightning", "timm", "transformers")

collect_ignore = [
    f"src/steppe/integrations/{file}.py"
    for file, package in [*((name, name) for name in TRAINERS), ("fabric", "lightning")]
    if importlib.util.find_spec(package) is None
]
