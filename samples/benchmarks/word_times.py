"""Word times of speech, of recognizers and of a forced alignment in the same sounds.

    pip install pocketsphinx
    python samples/benchmarks/word_times.py --model kokoro-82m

Fifty Harvard sentences (IEEE, 1969) are spoken, transcribed and aligned. Of each two sources, words
that both have are compared: prints a table of how far apart starts and ends are. `word_truths` has
the alignment, and the onsets of hissing words, the last rows of the table.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from word_truths import Aligner, TimedWord, Times, hisses

from triptych import SpeechPipeline, TranscriptionPipeline
from triptych.modalities.asr.api.pipeline import resample
from triptych.modalities.tts.api.pipeline import Speech

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
RECOGNIZERS = ("whisper-base", "whisper-tiny.en")
VOICE, ALIGNMENT, HISSES = "voice", "alignment", "onset of a hiss"
Sources = Mapping[str, Sequence[TimedWord]]
"""The words of one sentence by source: the voice, recognizers, the alignment."""


def plain(word: str) -> str:
    """Letters alone."""
    return re.sub(r"[^a-z']", "", word.lower())


def pairs(first: Sequence[TimedWord], second: Sequence[TimedWord]) -> Iterator[tuple[Times, Times]]:
    """The times of the words that both have, in order."""
    words = ([plain(word) for word, _ in each] for each in (first, second))
    blocks = difflib.SequenceMatcher(None, *words, autojunk=False).get_matching_blocks()
    for block in blocks:
        for at in range(block.size):
            yield first[block.a + at][1], second[block.b + at][1]


def speak_all(model: str, voice: str, speed: float) -> list[Speech]:
    """The sentences in a voice."""
    with SpeechPipeline.from_pretrained(model, progress=False) as speak:
        return [speak(sentence, voice=voice, speed=speed, seed=1) for sentence in SENTENCES]


def hear_all(recognizer: str, spoken: Sequence[Speech]) -> list[list[TimedWord]]:
    """The words that a recognizer hears in each sentence."""
    with TranscriptionPipeline.from_pretrained(recognizer, progress=False) as hear:
        return [
            [
                (word.text, (word.start_s, word.end_s))
                for word in hear(resample(each.audio, each.sample_rate), has_word_times=True).words
            ]
            for each in spoken
        ]


def align_all(spoken: Sequence[Speech]) -> list[list[TimedWord]]:
    """The words of each sentence where an aligner finds them."""
    align = Aligner()
    return [
        align(
            resample(each.audio, each.sample_rate),
            [plain(word) for word in sentence.split()],
        )
        for sentence, each in zip(SENTENCES, spoken, strict=True)
    ]


def onset_gaps(speech: Speech, words: Sources) -> Iterator[tuple[str, float]]:
    """How much later than the onset of a hiss each source has its word."""
    aligned = words[ALIGNMENT]
    for at, onset_s in hisses(speech.audio, speech.sample_rate, aligned):
        for source, theirs in words.items():
            starts_s = {own: start_s for (start_s, _), (own, _) in pairs(theirs, aligned)}
            if aligned[at][1][0] in starts_s:
                yield source, starts_s[aligned[at][1][0]] - onset_s


def row(names: str, what: str, gaps_s: Sequence[float]) -> str:
    """A row of the table."""
    sizes_s = [abs(gap_s) for gap_s in gaps_s]
    median, tenth = statistics.median(sizes_s), statistics.quantiles(sizes_s, n=10)[-1]
    shares = (
        f"{sum(size_s <= bound_s + 1e-4 for size_s in sizes_s) / len(sizes_s):.0%}"
        for bound_s in (0.05, 0.1)
    )
    times = (f"{1000 * each:.0f}" for each in (median, tenth))
    bias = f"{1000 * statistics.median(gaps_s):+.0f}"
    return " | ".join(("| " + names, what, str(len(gaps_s)), bias, *times, *shares)) + " |"


def table(spoken: Sequence[Speech], sentences: Sequence[Sources]) -> Iterator[str]:
    """Rows of each two sources, and of each and the onsets of hisses."""
    yield "| | | words | bias, ms | median, ms | p90, ms | within 50 ms | within 100 ms |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for first, second in itertools.combinations(sentences[0], 2):
        found = [pair for each in sentences for pair in pairs(each[first], each[second])]
        for what, index in (("starts", 0), ("ends", 1)):
            gaps_s = [ours[index] - theirs[index] for ours, theirs in found]
            yield row(f"{first}, {second}", what, gaps_s)
    by_source = defaultdict(list)
    for speech, words in zip(spoken, sentences, strict=True):
        for source, gap_s in onset_gaps(speech, words):
            by_source[source].append(gap_s)
    for source, gaps_s in by_source.items():
        yield row(f"{source}, {HISSES}", "starts", gaps_s)


def main() -> None:
    """Speak, transcribe, align, compare and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="triptych-voice")
    parser.add_argument("--voice", default="")
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--recognizer", action="append", help="by default, both that are built in")
    args = parser.parse_args()
    spoken = speak_all(args.model, args.voice, args.speed)
    columns = {
        VOICE: [[(word.text, (word.start_s, word.end_s)) for word in each.words] for each in spoken]
    }
    for recognizer in args.recognizer or RECOGNIZERS:
        columns[recognizer] = hear_all(recognizer, spoken)
    columns[ALIGNMENT] = align_all(spoken)
    rows = zip(*columns.values(), strict=True)
    sentences = [dict(zip(columns, words, strict=True)) for words in rows]
    print("\n".join(table(spoken, sentences)))


if __name__ == "__main__":
    main()
