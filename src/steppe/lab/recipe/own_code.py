"""The user's own code that a recipe names: hashes that tell whether it has changed since a run."""

from __future__ import annotations

import hashlib
import importlib.util
import uuid
from pathlib import Path

from ...support.errors import UserError
from ...support.own_objects import is_kept, kept
from .fingerprints import fingerprint
from .method_text import finished_method, own_classes
from .recipe import Recipe, is_users

_PACKAGES = ("steppe", "timm", "torch", "pytorch_optimizer")  # identified by their versions
_UNKNOWN = f"unknown-{uuid.uuid4().hex[:8]}"  # differs in every process: a run that cannot be recognised is repeated


def code_of(recipe: Recipe) -> dict[str, str]:
    """Hashes of the user's own code: of files by module name, and of objects of a Python program by their names."""
    names = own_names(recipe)
    modules = sorted({name.partition(":")[0] for name in names if not is_kept(name)})
    files = {module: _file_of(module) for module in modules if module.partition(".")[0] not in _PACKAGES}
    found = {module: hashlib.sha256(file.read_bytes()).hexdigest()[:16] for module, file in files.items() if file}
    return found | {name: _hash(name) or _UNKNOWN for name in names if is_kept(name)}


def own_names(recipe: Recipe) -> list[str]:
    """The names of the user's own functions and classes in a recipe."""
    names = [recipe.data] if is_users(recipe.data) else []
    names += [recipe.model] if ":" in recipe.model and not recipe.model.startswith("timm:") else []
    names += [name for name in (recipe.base, recipe.loss, metric_name(recipe.metric)) if ":" in name]
    if ":" in recipe.method:
        finished = finished_method(recipe.method) is not None
        names += [recipe.method] if finished else own_classes(recipe.build_method())
    return list(dict.fromkeys(names))


def metric_name(text: str) -> str:
    """The function of a metric, without the suffix that says whether lower or higher is better."""
    return text.removesuffix(":lower").removesuffix(":higher")


def unreadable(recipe: Recipe) -> list[str]:
    """The objects of a Python program whose content cannot be hashed: runs with them are repeated."""
    return [name for name in own_names(recipe) if is_kept(name) and _hash(name) is None]


_hashes: dict[tuple[str, int], str | None] = {}


def _hash(name: str) -> str | None:
    try:
        thing = kept(name)
    except UserError:  # an object of an earlier program: reported when it is needed
        return None
    key = (name, id(thing))  # kept objects stay alive, so that an id is not used twice
    if key not in _hashes or callable(thing):  # data is hashed once; a function may use variables that have changed
        _hashes[key] = fingerprint(thing)
    return _hashes[key]


def _file_of(module: str) -> Path | None:
    try:
        found = importlib.util.find_spec(module)
    except Exception:  # its package cannot be imported: reported when it is needed
        return None
    file = Path(found.origin) if found is not None and found.origin else None
    return file if file is not None and file.is_file() else None
