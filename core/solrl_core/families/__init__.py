"""Backbone families, found by the pipeline class that a folder's model_index.json names."""

from solrl_core.families.base import Backbone, Conditioning, ModelOptions
from solrl_core.families.load import load_backbone

__all__ = ["Backbone", "Conditioning", "ModelOptions", "load_backbone"]
