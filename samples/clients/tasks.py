"""The tasks of the clients: a question, two tools and questions for them, an extraction.

The tools are plain functions: each framework makes its own kind of tool from their names, types
and docstrings.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Sequence

from pydantic import BaseModel, Field

QUESTION = "What is the capital of France?"
PRICE_QUESTION = "What is the price of a lamp?"
PERSON_TEXT = "Ada Lovelace was 36 years old. Give her name and her age as a JSON object."
QUESTIONS = {
    "What is 137 * 49?": "6713",
    "What is (1024 - 64) / 32?": "30",
    PRICE_QUESTION: "24.9",
    "What is the price of a desk?": "189",
    "What is 3.25 * 12?": "39",
}
"""Questions to agents, and the text that each answer must contain."""
INSTRUCTIONS = (
    "Use the tools: calculate for arithmetic, look_up_price for prices."
    " Then answer in one short sentence."
)
PRICES = {"apple": "0.40", "notebook": "3.25", "lamp": "24.90", "desk": "189.00"}
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


ANIMALS = ["Bananas are yellow.", "Whales swim in the ocean.", "The moon is bright."]
SEA = "Which animals live in the sea?"
"""A question, and documents of which one answers it."""

MAX_TOKENS = 200
MAX_STEPS = 3
"""Limit of an agent's turns: small models do not always stop by themselves."""


class Answer(BaseModel):
    """The final answer to the user's question."""

    answer: str


class Person(BaseModel):
    """A person and their age."""

    name: str
    age: int = Field(ge=0)


def calculate(expression: str) -> str:
    """Calculates an arithmetic expression.

    Args:
        expression: numbers, + - * / and parentheses, such as "(2 + 3) * 4"

    """
    try:
        return f"{_value(ast.parse(expression.strip(), mode='eval').body):g}"
    except (SyntaxError, ValueError, ZeroDivisionError) as error:
        return f"error: {error}"


def look_up_price(item: str) -> str:
    """Looks up the price of an item in the shop's list.

    Args:
        item: the item's name, such as "apple"

    """
    price = PRICES.get(item.strip().lower())
    return f"{price} euros" if price else f"error: no {item}; there are {', '.join(PRICES)}"


PRICE_FUNCTION = {
    "name": look_up_price.__name__,
    "description": "Looks up the price of an item.",
    "parameters": {
        "type": "object",
        "properties": {"item": {"type": "string"}},
        "required": ["item"],
        "additionalProperties": False,
    },
}
"""The same tool for clients that take a schema."""


def nearest(query: Sequence[float], documents: Sequence[Sequence[float]]) -> str:
    """Which of `ANIMALS` is nearest to the vector of the question, which has to be the whales."""
    scores = [sum(a * b for a, b in zip(query, each, strict=True)) for each in documents]
    assert len(scores) == len(ANIMALS)
    found = ANIMALS[scores.index(max(scores))]
    assert "ocean" in found, scores
    return found


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
            return float(_OPERATORS[type(sign)](_value(left), _value(right)))
        case ast.UnaryOp(ast.USub(), operand):
            return -_value(operand)
    raise ValueError("only numbers, + - * / and parentheses")
