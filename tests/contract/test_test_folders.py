"""Tests are found by the path of what they test."""

from __future__ import annotations

from pathlib import Path

import triptych

TESTS = Path(__file__).parents[1]
PRODUCT = Path(triptych.__file__).parent
OWN_FOLDERS = {
    "clients",
    "contract",
    "dryrun",
    "faults",
    "gpu",
    "imports",
    "live",
    "parity",
    "property",
    "samples",
    "security",
    "support",
}
"""Folders of tests with no folder of the product."""
TESTED_ELSEWHERE = {
    "modalities/asr/engine/decoding": "parity/test_recognizer_parity.py",
    "modalities/asr/engine/families": "parity/test_recognizer_parity.py",
    "modalities/tts": "modalities/test_registry.py",
    "modalities/tts/configs": "modalities/tts/engine/models/kokoro/test_weights.py",
    "modalities/tts/engine/models": "parity/test_spoken_parity.py",
    "modalities/tts/sources": "modalities/tts/engine/models/kokoro/test_weights.py",
    "modalities/vlm/configs": "modalities/vlm/processing/test_processor.py",
}
"""Folders of the product whose tests are in another place, and that place."""


def product_folders() -> set[str]:
    return {
        str(Path(top, path.parent.relative_to(PRODUCT.joinpath(top).resolve())))
        for top in ("core", "schedulers", "modalities")
        for path in PRODUCT.joinpath(top).resolve().rglob("*.py")
        if path.name != "__init__.py"
    }


def folders_of_tests() -> set[str]:
    return {str(path.parent.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")}


def test_a_folder_of_tests_is_named_as_what_it_tests() -> None:
    assert folders_of_tests() - OWN_FOLDERS - product_folders() == {"."}  # of `src/triptych`


def test_a_folder_of_the_product_has_its_tests() -> None:
    product = product_folders()
    assert len(product) > 40, "the whole product was read"
    assert product - folders_of_tests() == set(TESTED_ELSEWHERE)
    assert [file for file in TESTED_ELSEWHERE.values() if not (TESTS / file).is_file()] == []
