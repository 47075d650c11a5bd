"""Models from one format to another: folders or GGUF files to GGUF files of any quantization."""

from __future__ import annotations

from quire.convert.convert import Converted, convert
from quire.convert.recipe import FORMATS, Recipe

__all__ = ["FORMATS", "Converted", "Recipe", "convert"]
