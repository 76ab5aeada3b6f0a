"""Schemas as clients make them from pydantic's models: the model reads each output back."""

import datetime
import enum
import uuid
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field
from support.compiled_grammars import automaton_of_schema
from support.walks import Walker


class Mood(enum.Enum):
    GLAD = "glad"
    SAD = "sad"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=0, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str = Field(min_length=1, max_length=20, pattern=r"^[A-Z][a-z]*$")


class Node(BaseModel):
    value: float
    below: list["Node"] = Field(default_factory=list, max_length=2)


class Order(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: uuid.UUID
    day: datetime.date
    at: datetime.datetime | None = None
    price: int | float
    share: float = Field(gt=0, lt=1)
    step: int = Field(multiple_of=5)
    tags: list[str] = Field(default_factory=list, max_length=3)
    place: tuple[int, float]
    counts: dict[str, int]
    mood: Mood = Mood.GLAD
    paid: bool
    note: str | None


class Owner(BaseModel):
    pets: list[Annotated[Cat | Dog, Field(discriminator="kind")]]
    first: Cat | Dog | None = None


@pytest.mark.parametrize("model", [Cat, Dog, Node, Order])
def test_what_is_generated_is_read_back(model: Any, rng: np.random.Generator) -> None:
    walker = Walker(automaton_of_schema(model.model_json_schema()))
    for _ in range(60):
        model.model_validate_json(walker.draw(rng, int(rng.integers(0, 300))))


def test_a_discriminator_must_be_required(rng: np.random.Generator) -> None:
    """Its tag is in each of the alternatives, which therefore exclude each other."""
    walker = Walker(automaton_of_schema(Owner.model_json_schema()))
    kinds = set()
    for _ in range(60):
        owner = Owner.model_validate_json(walker.draw(rng, int(rng.integers(0, 300))))
        kinds |= {type(pet) for pet in owner.pets}
    assert kinds == {Cat, Dog}
