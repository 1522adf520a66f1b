"""What a spec would come to, and what nodes are asked and answer."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from octrain_api.problems import ProblemError


class NodeFit(BaseModel):
    """Whether one registered node could run the job."""

    node: str = Field(description="the node's name")
    fits: bool
    reason: str | None = Field(description="why not")
    is_live: bool = Field(description="whether it is heard")
    free: bool = Field(description="whether it has room for the job at this moment")


class Warning(BaseModel):
    """Something that is allowed, and probably not what was meant."""

    code: str
    message: str
    pointer: str | None = Field(description="JSON pointer into the spec")


class TimeEstimate(BaseModel):
    """How long the training takes, by what the owner's like jobs did."""

    tokens_per_second: float = Field(description="median over those jobs")
    seconds: float = Field(description="for all steps, without evaluation and checkpoints")
    from_jobs: list[str] = Field(description="the jobs it was measured on, newest first")
    device: str


class ValidationReport(BaseModel):
    """Everything that can be known of a job before it is submitted."""

    valid: bool = Field(description="whether POST /jobs would take it")
    errors: list[ProblemError]
    warnings: list[Warning]
    spec: dict[str, Any] | None = Field(description="with every default; null unless it is valid")
    recipe_from: dict[str, Any] | None
    nodes: list[NodeFit]
    plan_status: Literal["ready", "pending", "failed", "unavailable"] = Field(
        description="`pending`: ask again, a node is at it; `unavailable`: no live node to ask"
    )
    plan_detail: str | None = Field(description="why there is no plan")
    plan: dict[str, Any] | None = Field(
        description="parameters, what converts and what is kept why, bytes by use, FLOPs per step"
    )
    time: TimeEstimate | None = Field(description="null while no like job has run")


class PlanQuestion(BaseModel):
    """A spec that a node is asked to plan."""

    key: str
    owner: str
    spec: dict[str, Any]
    roots: list[str] | None = Field(
        default=None, description="the folders that the owner may read; null: all of the node's"
    )


class PlanTaken(BaseModel):
    """A question, or null where nobody asked within the wait."""

    question: PlanQuestion | None


class PlanStored(BaseModel):
    """Whether the answer was still wanted of this node."""

    stored: bool


class PlanAnswer(BaseModel):
    """What the node found: a result, or why there is none."""

    model_config = ConfigDict(extra="forbid")

    result: dict[str, Any] | None = None
    problem: str | None = Field(default=None, max_length=4000)
