"""The base of every described type, and the one error a user's mistake becomes."""

from pydantic import BaseModel, ConfigDict


class PlanError(ValueError):
    """A run that cannot be: which field, its value, the rule it breaks, and a value that works."""

    def __init__(self, field: str, value: object, rule: str, fix: str) -> None:
        self.field = field
        self.value = value
        self.rule = rule
        self.fix = fix
        super().__init__(f"{field} = {value}: {rule} {fix}")

    def __reduce__(self) -> tuple[type["PlanError"], tuple[str, object, str, str]]:
        return type(self), (self.field, self.value, self.rule, self.fix)


class Spec(BaseModel):
    """A frozen, validated description; an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")
