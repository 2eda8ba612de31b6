"""A suggestion is a misspelling's name, and never a name with another meaning."""

import pytest

from triptych.core.process.suggestions import nearest

NAMES = [
    *("--port", "--host", "--api-key-file", "--allowed-media-domains", "--chunk-size"),
    *("--max-batch-size", "--max-num-loras", "--model-path", "--no-page", "--tp-size"),
]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--prot", "--port"),
        ("--hots", "--host"),
        ("--api-key-files", "--api-key-file"),
        ("--apikey-file", "--api-key-file"),
        ("--max_batch_size", "--max-batch-size"),
        ("--max-size-batch", "--max-batch-size"),
        ("--max-bacth-size", "--max-batch-size"),
        ("-max-batch-size", "--max-batch-size"),
        ("--CHUNK-SIZE", "--chunk-size"),
        ("--api-key-fil", "--api-key-file"),
        ("--max-num-lor", "--max-num-loras"),
    ],
)
def test_a_misspelled_name_is_found(typed: str, meant: str) -> None:
    assert nearest(typed, NAMES) == meant


@pytest.mark.parametrize(
    "typed",
    [
        *("--ssl-keyfile", "--allowed-origins", "--block-size", "--max-num-seqs", "--root-path"),
        *("--enforce-eager", "--ctx-size", "--batch-size", "--size", "zzz", "", "--"),
    ],
)
def test_another_name_gets_no_suggestion(typed: str) -> None:
    assert nearest(typed, NAMES) is None


def test_a_known_word_is_no_misspelling_of_another() -> None:
    assert nearest("--max-stop", ["--max-step"]) == "--max-step"
    assert nearest("--max-stop", ["--max-step", "--stop"]) is None
    assert nearest("--max-stop", ["--max-step"], vocabulary=["--stop-at"]) is None


def test_a_word_that_was_cut_short_is_completed_before_likelier_ones() -> None:
    assert nearest("--out", ["-ot", "--output"]) == "--output"
    assert nearest("--ou", ["--output"]) is None
    assert nearest("--out", ["--output-folder"]) is None


def test_letters_that_changed_places_come_first_and_a_tie_gets_no_suggestion() -> None:
    assert nearest("--lroa", ["--load", "--lora"]) == "--lora"
    assert nearest("--temps", ["--temp", "--tempo"]) == "--temp"
    assert nearest("--hoot", ["--host", "--hoop"]) is None
