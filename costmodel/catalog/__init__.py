"""Known accelerators, node shapes and models, and plain tables of number formats, optimizers and strategies."""

from costmodel.catalog.accelerators import AcceleratorEntry, accelerator, accelerator_entry, list_accelerators
from costmodel.catalog.clusters import cluster
from costmodel.catalog.models import ModelEntry, list_models, model, model_entry, unsupported_reason
from costmodel.catalog.nodes import NodeShape, list_clusters, node_shape
from costmodel.catalog.tables import NUMBER_FORMATS, OPTIMIZERS, STRATEGIES, NumberFormat, OptimizerFacts, Strategy

__all__ = [
    "NUMBER_FORMATS", "OPTIMIZERS", "STRATEGIES", "AcceleratorEntry", "ModelEntry", "NodeShape", "NumberFormat", "OptimizerFacts", "Strategy",
    "accelerator", "accelerator_entry", "cluster", "list_accelerators", "list_clusters", "list_models", "model", "model_entry", "node_shape",
    "unsupported_reason",
]
