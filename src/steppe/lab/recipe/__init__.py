"""Everything that the result of a run depends on."""

from .method_text import make_method
from .recipe import SMALL_MODELS, Recipe, filled, is_users, read_settings, suggested, suggested_model

__all__ = [
    "SMALL_MODELS",
    "Recipe",
    "filled",
    "is_users",
    "make_method",
    "read_settings",
    "suggested",
    "suggested_model",
]
