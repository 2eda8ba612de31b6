"""docs/metrics.md has every metric family, and dashboard and alerts name only these.

Run as a program, it prints the tables of the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from triptych.core.process.metric_table import FAMILIES, GROUPS, MetricFamily

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
_NAME = re.compile(r"\b((?:triptych|process)_\w+)")
_ADDED = {"le", "job", "instance", "replica"}  # by histograms, by Prometheus, by replicas


def tables() -> str:
    parts = []
    for title, families in GROUPS.items():
        rows = [f"### {title}", "", "| family | type | labels | meaning |", "|---|---|---|---|"]
        parts.append("\n".join([*rows, *map(_row, families)]))
    return "\n\n".join(parts)


def _row(family: MetricFamily) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels)
    return f"| `{family.name}` | {family.kind} | {labels} | {family.help} |"


def expressions() -> Iterator[str]:
    """Every expression of the dashboard and the alert rules."""
    board = json.loads((ROOT / "docker" / "grafana" / "triptych.json").read_text())
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]
    yield from (rule["expr"] for rule in rules())


def rules() -> list[dict[str, Any]]:
    text = (ROOT / "docker" / "prometheus" / "alerts.yaml").read_text()
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def family_of(name: str) -> MetricFamily | None:
    """The family of a series: histograms have three."""
    if name in FAMILIES:
        return FAMILIES[name] if FAMILIES[name].kind != "histogram" else None
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    found = FAMILIES.get(base)
    return found if found is not None and found.kind == "histogram" else None


def test_the_page_has_every_family() -> None:
    hint = "run `PYTHONPATH=tests python tests/contract/test_metrics_doc.py` for the tables"
    assert tables() in PAGE.read_text(encoding="utf-8"), hint


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_dashboard_and_alerts_name_families_and_labels_that_exist(expression: str) -> None:
    names = set(_NAME.findall(expression))
    families = {name: family_of(name) for name in names}
    assert [name for name, family in families.items() if family is None] == []
    known = {label for family in families.values() if family for label in family.labels}
    used = {
        label.strip()
        for group in re.findall(r"\bby \(([^)]*)\)", expression)
        for label in group.split(",")
    }
    used |= set(re.findall(r"[{,]\s*(\w+)\s*(?:=~?|!=|!~)", expression))
    assert used <= known | _ADDED
    assert expression.count("(") == expression.count(")")
    for name, family in families.items():
        if family is not None and family.kind == "counter":
            assert re.search(rf"(?:rate|increase)\({name}[{{\[]", expression), "counters only rise"


def test_alerts_say_what_happened_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) >= 8
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        labels = set(re.findall(r"\$labels\.(\w+)", str(rule["annotations"])))
        by = re.findall(r"\bby \(([^)]*)\)", rule["expr"])
        kept = {label.strip() for label in ",".join(by).split(",")} if by else {"instance", "job"}
        assert labels <= kept, "an aggregation keeps the labels that its texts name"


def test_panels_do_not_overlap() -> None:
    board = json.loads((ROOT / "docker" / "grafana" / "triptych.json").read_text())
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


if __name__ == "__main__":
    print(tables())
