# /// script
# dependencies = ["dspy==3.4.1"]
# ///
"""DSPy: its quick start's Predict and ChainOfThought, typed outputs, an agent."""

from __future__ import annotations

import dspy
from checks import Server, run_checks, said
from tasks import MAX_STEPS, MAX_TOKENS, PRICE_QUESTION, QUESTION, calculate, look_up_price


class Extract(dspy.Signature):
    """Extract the person's name and age."""

    text: str = dspy.InputField()
    name: str = dspy.OutputField()
    age: int = dspy.OutputField()


def set_up(server: Server, adapter: dspy.Adapter | None = None) -> None:
    """Configure DSPy for the server, without a cache."""
    model = dspy.LM(
        f"openai/{server.model}",
        api_base=server.v1,
        api_key=server.key,
        temperature=0,
        max_tokens=2 * MAX_TOKENS,
        cache=False,
    )
    dspy.configure(lm=model, adapter=adapter)


def predict(server: Server) -> str:
    """A question, in the adapter that is the default."""
    set_up(server)
    return said(dspy.Predict("question -> answer")(question=QUESTION).answer, "Paris")


def chain_of_thought(server: Server) -> str:
    """The quick start's: a number, with the reasoning before it."""
    set_up(server)
    reply = dspy.ChainOfThought("question -> answer: float")(
        question="Two dice are tossed. What is the probability that the sum equals two?"
    )
    assert isinstance(reply.answer, float)
    return said(f"{reply.answer} because {reply.reasoning}", "0.02")


def typed(server: Server) -> str:
    """Typed outputs, in the adapter that is the default."""
    set_up(server)
    return said(repr(dspy.Predict(Extract)(text="Ada Lovelace was 36 years old.")), "age=36")


def json_adapter(server: Server) -> str:
    """Typed outputs by a schema."""
    set_up(server, dspy.JSONAdapter())
    return said(repr(dspy.Predict(Extract)(text="Ada Lovelace was 36 years old.")), "age=36")


def react(server: Server) -> str:
    """An agent that chooses among two tools by itself."""
    set_up(server)
    agent = dspy.ReAct("question -> answer", tools=[calculate, look_up_price], max_iters=MAX_STEPS)
    return said(agent(question=PRICE_QUESTION).answer, "24.9")


def main() -> None:
    """Try each function."""
    run_checks("dspy", predict, chain_of_thought, typed, json_adapter, react)


if __name__ == "__main__":
    main()
