"""What the user describes: Model, Cluster, Plan, Recipe, and the Run that joins them."""

from costmodel.spec.base import PlanError, Spec
from costmodel.spec.cluster import Accelerator, Cluster, Level
from costmodel.spec.model import MLA, Model, MoE
from costmodel.spec.plan import Checkpointing, Plan
from costmodel.spec.recipe import DTYPE_BYTES, OptimizerSpec, Precision, Recipe
from costmodel.spec.run import Run

__all__ = ["DTYPE_BYTES", "MLA", "Accelerator", "Checkpointing", "Cluster", "Level", "MoE", "Model", "OptimizerSpec", "Plan",
           "PlanError", "Precision", "Recipe", "Run", "Spec"]
