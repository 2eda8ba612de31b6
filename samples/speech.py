"""Speech from Python: a file, a stream, voices and speeds.

Run it with `python samples/speech.py`; it writes `morning.wav` into the current folder. The voice
is part of the package, so no network is needed.
"""

from __future__ import annotations

import time

import numpy as np

from triptych import SpeechPipeline

STORY = (
    "It was a dark and stormy night. The rain fell in torrents, except at occasional intervals,"
    " when it was checked by a violent gust of wind which swept up the streets."
)


def main() -> None:
    """Show each way of calling the pipeline."""
    with SpeechPipeline.from_pretrained() as speak:
        print("-- a file")
        speech = speak("Good morning. On 12 May this cost $3.50.")
        speech.save("morning.wav")
        print(f"morning.wav: {speech.duration_s:.1f} s, {speech.coverage:.0%} of the text spoken")

        print("-- a stream: audio arrives while the rest is synthesized")
        started_s = time.monotonic()
        for samples in speak.stream(STORY):
            duration_s = len(samples) / speak.sample_rate
            print(f"after {time.monotonic() - started_s:.2f} s: {duration_s:.2f} s of audio")

        print("-- voices and speeds")
        for voice in speak.voices[:3]:
            for speed in (0.8, 1.3):
                speech = speak(f"My name is {voice.name}.", voice=voice.name, speed=speed)
                peak = float(np.abs(speech.audio).max())
                print(f"{voice.name} at {speed}: {speech.duration_s:.1f} s, peak {peak:.2f}")


if __name__ == "__main__":
    main()
