"""What a training step costs in memory and time when it is spread over many GPUs.

    from costmodel import build_run, predict
    report = predict(build_run(params="1B", cluster={"gpus": 8}, plan={"zero": 3}))
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["PlanError", "Run", "StepReport", "build_run", "predict", "resolve"]

_HOME = {"Run": "costmodel.spec", "PlanError": "costmodel.spec", "build_run": "costmodel.inputs", "resolve": "costmodel.inputs",
         "predict": "costmodel.prediction", "StepReport": "costmodel.report"}

if TYPE_CHECKING:
    from costmodel.inputs import build_run, resolve
    from costmodel.prediction import predict
    from costmodel.report import StepReport
    from costmodel.spec import PlanError, Run


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'costmodel' has no attribute {name!r}")
