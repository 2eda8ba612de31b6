"""Word times of speech, compared with those that a recognizer finds in the same sound.

    python samples/benchmarks/word_times.py --model kokoro-82m --recognizer whisper-base

Fifty Harvard sentences (IEEE, 1969) are spoken and transcribed. Words that both have are compared:
prints the median difference of starts and ends, and how many lie within 50, 100 and 200 ms. The
recognizer's times are estimates, too: Whisper's come in steps of 20 ms.
"""

from __future__ import annotations

import argparse
import difflib
import re
import statistics
from collections.abc import Sequence

from triptych import SpeechPipeline, TranscriptionPipeline
from triptych.modalities.asr.api.pipeline import resample

SENTENCES = (
    "The birch canoe slid on the smooth planks.",
    "Glue the sheet to the dark blue background.",
    "It's easy to tell the depth of a well.",
    "These days a chicken leg is a rare dish.",
    "Rice is often served in round bowls.",
    "The juice of lemons makes fine punch.",
    "The box was thrown beside the parked truck.",
    "The hogs were fed chopped corn and garbage.",
    "Four hours of steady work faced us.",
    "A large size in stockings is hard to sell.",
    "The boy was there when the sun rose.",
    "A rod is used to catch pink salmon.",
    "The source of the huge river is the clear spring.",
    "Kick the ball straight and follow through.",
    "Help the woman get back to her feet.",
    "A pot of tea helps to pass the evening.",
    "Smoky fires lack flame and heat.",
    "The soft cushion broke the man's fall.",
    "The salt breeze came across from the sea.",
    "The girl at the booth sold fifty bonds.",
    "The small pup gnawed a hole in the sock.",
    "The fish twisted and turned on the bent hook.",
    "Press the pants and sew a button on the vest.",
    "The swan dive was far short of perfect.",
    "The beauty of the view stunned the young boy.",
    "Two blue fish swam in the tank.",
    "Her purse was full of useless trash.",
    "The colt reared and threw the tall rider.",
    "It snowed, rained, and hailed the same morning.",
    "Read verse out loud for pleasure.",
    "Hoist the load to your left shoulder.",
    "Take the winding path to reach the lake.",
    "Note closely the size of the gas tank.",
    "Wipe the grease off his dirty face.",
    "Mend the coat before you go out.",
    "The wrist was badly strained and hung limp.",
    "The stray cat gave birth to kittens.",
    "The young girl gave no clear response.",
    "The meal was cooked before the bell rang.",
    "What joy there is in living.",
    "A king ruled the state in the early days.",
    "The ship was torn apart on the sharp reef.",
    "Sickness kept him home the third week.",
    "The wide road shimmered in the hot sun.",
    "The lazy cow lay in the cool grass.",
    "Lift the square stone over the fence.",
    "The rope will bind the seven books at once.",
    "Hop over the fence and plunge in.",
    "The friendly gang left the drug store.",
    "Mesh wire keeps chicks inside.",
)
Times = tuple[float, float]


def plain(word: str) -> str:
    """Letters alone."""
    return re.sub(r"[^a-z]", "", word.lower())


def pairs(
    spoken: Sequence[tuple[str, Times]], heard: Sequence[tuple[str, Times]]
) -> list[tuple[Times, Times]]:
    """The times of the words that both have, in order."""
    first, second = ([plain(word) for word, _ in each] for each in (spoken, heard))
    blocks = difflib.SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()
    return [
        (spoken[block.a + at][1], heard[block.b + at][1])
        for block in blocks
        for at in range(block.size)
    ]


def main() -> None:
    """Speak, transcribe, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="triptych-voice")
    parser.add_argument("--voice", default="")
    parser.add_argument("--recognizer", default="whisper-base")
    args = parser.parse_args()
    found: list[tuple[Times, Times]] = []
    num_words = 0
    with (
        SpeechPipeline.from_pretrained(args.model, progress=False) as speak,
        TranscriptionPipeline.from_pretrained(args.recognizer, progress=False) as hear,
    ):
        for sentence in SENTENCES:
            speech = speak(sentence, voice=args.voice, seed=1)
            sound_S = resample(speech.audio, speech.sample_rate)
            transcript = hear(sound_S, has_word_times=True)
            num_words += len(speech.words)
            found += pairs(
                [(word.text, (word.start_s, word.end_s)) for word in speech.words],
                [(word.text, (word.start_s, word.end_s)) for word in transcript.words],
            )
    print(f"{len(SENTENCES)} sentences, {num_words} words, {len(found)} heard as spoken")
    for name, index in (("starts", 0), ("ends", 1)):
        gaps_s = [ours[index] - theirs[index] for ours, theirs in found]
        sizes_s = [abs(gap_s) for gap_s in gaps_s]
        shares = ", ".join(
            f"{sum(size_s <= bound_ms / 1000 for size_s in sizes_s) / len(sizes_s):.0%}"
            f" within {bound_ms} ms"
            for bound_ms in (50, 100, 200)
        )
        print(
            f"{name}: median {1000 * statistics.median(sizes_s):.0f} ms apart"
            f" (ours {1000 * statistics.median(gaps_s):+.0f} ms), {shares}"
        )


if __name__ == "__main__":
    main()
