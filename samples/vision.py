"""Questions about images from Python: one image, several, a stream, a conversation.

Run it with `python samples/vision.py MODEL IMAGE [IMAGE]`, where MODEL is any vision model,
such as HuggingFaceTB/SmolVLM-256M-Instruct.
"""

from __future__ import annotations

import sys

from triptych import VisionPipeline


def main() -> None:
    """Show each way of calling the pipeline."""
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    model, *images = sys.argv[1:]
    with VisionPipeline.from_pretrained(model) as see:
        print("-- a question about one image")
        answer = see(images[0], "What is in this picture?", max_tokens=60)
        print(answer.text, answer.usage)

        print("-- a stream, about all images")
        for piece in see.stream(images, "Describe what you see.", max_tokens=60):
            print(piece, end="", flush=True)
        print()

        print("-- a conversation: the image is encoded once, its part of the prompt is cached")
        shown = {"type": "image", "image": images[0]}
        talk = [{"role": "user", "content": [shown, {"type": "text", "text": "What is this?"}]}]
        first = see(talk, max_tokens=40)
        talk += [{"role": "assistant", "content": first.text}]
        talk += [{"role": "user", "content": "Which colours does it have?"}]
        second = see(talk, max_tokens=40)
        cached = f"{second.usage.num_cached_tokens} of {second.usage.num_prompt_tokens}"
        print(f"{second.text} ({cached} prompt tokens were cached)")


if __name__ == "__main__":
    main()
