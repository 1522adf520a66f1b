"""Recipes as they are given and shown."""

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from octrain_api.pagination import Page

RecipeName = Annotated[
    str, Field(min_length=1, max_length=64, pattern=r"^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$")
]

EXAMPLE_FRAGMENT: dict[str, Any] = {
    "recipe": {"engine": "te", "fp8_format": "HYBRID", "amax_history_len": 16},
    "conversion": {"keep_first_last": True},
}


class RecipeRequest(BaseModel):
    """A new recipe, or a new version of one."""

    model_config = ConfigDict(extra="forbid")

    name: RecipeName = Field(description="lower case; jobs name it in `recipe.name`")
    description: Annotated[str, Field(max_length=2000, pattern=r"^[^\x00]*$")] = ""
    fragment: dict[str, Any] = Field(
        description="parts of a spec: `recipe`, and where wanted `conversion`, `adapter` and "
        "`training.precision`",
        examples=[EXAMPLE_FRAGMENT],
        json_schema_extra={
            "properties": {
                "recipe": {"type": "object"},
                "conversion": {"type": "object"},
                "adapter": {"type": ["object", "null"]},
                "training": {"type": "object"},
            },
            "required": ["recipe"],
            "additionalProperties": False,
        },
    )


class RecipeObject(BaseModel):
    """A recipe of the service (`preset`) or of an owner, in one version."""

    name: str
    version: int = Field(description="1 for the first; a preset has only that one")
    preset: bool = Field(description="whether it comes with the service")
    owner: str | None = Field(description="null for a preset")
    title: str | None = Field(description="a preset's line of what it is")
    description: str
    needs: str | None = Field(description="what a node must have, for a preset")
    fragment: dict[str, Any] = Field(description="the parts of a spec that it stands for")
    created_at: datetime | None


class RecipeList(Page):
    """The newest version of every recipe: presets first, then the owner's by name."""

    items: list[RecipeObject]


class RecipeVersions(BaseModel):
    """Every version of one recipe, newest first."""

    items: list[RecipeObject]
