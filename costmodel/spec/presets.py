"""The words for precisions, and what each means in each framework."""

from costmodel.spec.base import PlanError
from costmodel.spec.plan import Plan
from costmodel.spec.recipe import DType, Precision

WORDS = ("fp32", "tf32", "fp16-mixed", "bf16-mixed", "bf16-pure", "fp8")
ALIASES = {"bf16": "bf16-mixed", "fp16": "fp16-mixed", "mixed": "bf16-mixed", "amp": "bf16-mixed", "autocast": "bf16-mixed",
           "pure": "bf16-pure", "float32": "fp32", "float16": "fp16-mixed", "bfloat16": "bf16-mixed", "tensorfloat32": "tf32"}


def precision_preset(word: str, plan: Plan) -> Precision:
    """The five dtypes of a precision word under a plan's framework.

    `bf16-mixed` has fp32 parameters in PyTorch (torch.autocast; FSDP2's MixedPrecisionPolicy with reduce_dtype fp32, as
    torchtitan ships it), bf16 parameters with an fp32 master copy in Megatron (gradients accumulated and reduced in fp32:
    18 bytes per parameter) and in DeepSpeed (gradients in bf16: DeepSpeed accumulates in the model dtype whenever ZeRO is on).
    """
    name = ALIASES.get(word.lower(), word.lower())
    if name not in WORDS:
        raise PlanError("recipe.precision", word, "is not a precision word.", f"Use one of {', '.join(WORDS)}, or give the five dtypes.")
    if name in ("fp32", "tf32"):
        return Precision(name=name, parameter="fp32", compute="tf32" if name == "tf32" else "fp32", gradient="fp32", reduce="fp32")
    if name == "bf16-pure":
        return Precision(name=name, parameter="bf16", compute="bf16", gradient="bf16", reduce="bf16", optimizer_state="bf16")
    low: DType = "fp16" if name == "fp16-mixed" else "bf16"
    scaling = low == "fp16"
    compute: DType = "fp8" if name == "fp8" else low
    recipe = "tensorwise" if name == "fp8" else "none"
    if plan.framework == "megatron":
        grad: DType = "fp16" if scaling else "fp32"
        return Precision(name=name, parameter=low, compute=compute, gradient=grad, reduce=grad, master="fp32", loss_scaling=scaling,
                         fp8_recipe=recipe)
    if plan.framework == "deepspeed":
        grad = "fp32" if plan.zero == 0 and not scaling else low
        return Precision(name=name, parameter=low, compute=compute, gradient=grad, reduce=low, master="fp32", loss_scaling=scaling,
                         fp8_recipe=recipe)
    return Precision(name=name, parameter="fp32", compute=compute, gradient="fp32", reduce="fp32", autocast=plan.zero != 3,
                     loss_scaling=scaling, fp8_recipe=recipe)
