"""Backbone families, selected by the pipeline class in a folder's model_index.json."""

from solrl_core.families.backbone import Conditioning
from solrl_core.families.load import load_backbone
from solrl_core.families.pipeline import PipelineBackbone as Backbone

__all__ = ["Backbone", "Conditioning", "load_backbone"]
