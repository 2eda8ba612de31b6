"""The list of named models is complete, and the page about models agrees with it."""

import re
from pathlib import Path

from triptych.core.options.declaration import ROLES
from triptych.modalities.catalog import catalog, role_in
from triptych.modalities.registry import default_models, known_sources

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_each_named_model_is_listed_once() -> None:
    names = [entry.name for entry in catalog()]
    assert len(names) == len(set(names))
    assert set(names) == {"smollm2-135m-instruct", *(source.name for source in known_sources())}
    assert {*default_models()} - {"embedded"} < set(names)
    assert all(entry.role in ROLES for entry in catalog())


def test_sizes_and_licenses_are_those_of_the_page() -> None:
    table = PAGE.read_text("utf-8").partition("Without `--model`")[0]
    rows = re.findall(r"^\| `([\w.-]+)`[^|]*\|(.*)\|$", table, re.MULTILINE)
    described = {name: [cell.strip() for cell in cells.split("|")] for name, cells in rows}
    for entry in catalog():
        *_, download, license_name = described[entry.name]
        assert license_name == entry.license
        shown_mb = int(download.removesuffix(" MB") or 0)
        assert abs(shown_mb - entry.download_bytes / 1e6) < 6


def test_a_folder_without_a_model_has_no_kind(tmp_path: Path) -> None:
    assert role_in(tmp_path) is None
