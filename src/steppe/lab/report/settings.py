"""The settings of a row: those of its method, the radius first, and where its recipe differs from that of the base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..statistics import Row
from . import formatting

FEW = 5  # settings that are shown in the table; the tooltip has all
OF_BASE = ("lr", "momentum", "weight_decay", "batch", "epochs", "schedule")  # the settings that are shown for the base
SHOWN_ELSEWHERE = ("data", "model", "model_settings", "method", "label_noise", "share", "hold_out", "metric", "loss")


def settings(row: Row, rows: Sequence[Row]) -> dict[str, str]:
    """Name and value of each setting, as text."""
    if row.role == "base":
        recipe = row.group.recipe
        return {
            display_name(name): display_value(recipe[name]) for name in OF_BASE if recipe.get(name) not in (None, "")
        }
    method = _of_method(row)
    first = {name: value for name, value in method.items() if name in ("rho", "rho_max")}
    found = {display_name(name): display_value(value) for name, value in {**first, **method}.items()}
    base = next((one.group.recipe for one in rows if one.role == "base"), None)
    return found | ({} if base is None else _differing(row.group.recipe, base))


def _of_method(row: Row) -> dict[str, Any]:
    for record in row.group.records:
        found = (record.get("method") or {}).get("settings")
        if isinstance(found, Mapping):
            return dict(found)
    return {}


def _differing(recipe: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, str]:
    names = [name for name in dict.fromkeys([*base, *recipe]) if name not in SHOWN_ELSEWHERE]
    return {display_name(name): display_value(recipe.get(name)) for name in names if recipe.get(name) != base.get(name)}


def listed(found: Mapping[str, str], most: int | None = None) -> str:
    """The settings in one line; if there are more than `most`, the first of them and the number of the others."""
    pairs = [f"{name} = {value}" for name, value in found.items()]
    if most is None or len(pairs) <= most + 1:
        return ", ".join(pairs)
    return f"{', '.join(pairs[:most])}, {len(pairs) - most} more"


def display_name(name: str) -> str:
    """The name of a setting as it is shown."""
    return {"rho": "ρ"}.get(name, name.replace("_", " "))


def display_value(value: Any) -> str:
    """The value of a setting as text."""
    if value is None or value == {} or value == [] or value == "":
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={display_value(v)}" for name, v in value.items())
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(display_value, value))})"
    return formatting.count(value) if isinstance(value, int) and value >= 10000 else str(value)
