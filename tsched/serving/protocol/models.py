"""GET /v1/models."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from tsched.serving.engine_client import ModelFacts


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "tkernels"
    max_model_len: int

    @classmethod
    def describe(cls, facts: ModelFacts) -> ModelCard:
        return cls(id=facts.name, created=facts.created, max_model_len=facts.max_model_len)


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]
