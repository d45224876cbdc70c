"""Backbone families, selected by the pipeline class in a folder's model_index.json."""

from solrl_core.families.backbone import Backbone, Conditioning
from solrl_core.families.load import load_backbone

__all__ = ["Backbone", "Conditioning", "load_backbone"]
