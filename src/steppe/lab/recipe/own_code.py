"""The user's own code that a recipe names: hashes that tell whether it has changed since a run."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from .recipe import Recipe, is_users


def code_of(recipe: Recipe) -> dict[str, str]:
    """A hash of each file that contains the user's own functions, by module name."""
    names = [recipe.model] if ":" in recipe.model else []
    names += [recipe.data] if is_users(recipe.data) else []
    modules = {name.partition(":")[0] for name in names}
    # Steppe's own modules are identified by its version.
    files = {module: _file_of(module) for module in sorted(modules) if module.partition(".")[0] != "steppe"}
    return {module: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for module, file in files.items() if file}


def _file_of(module: str) -> Path | None:
    try:
        found = importlib.util.find_spec(module)
    except Exception:  # a package that cannot be imported: reported when it is needed
        return None
    file = Path(found.origin) if found is not None and found.origin else None
    return file if file is not None and file.is_file() else None
