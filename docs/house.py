"""The image of docs/architecture.md: the rooms of the code and the imports between them.

python docs/house.py

Owns the layout of the drawing. Rooms and arrows come from the imports, which grimp reads as
`lint-imports` does. Knows nothing of what a room is for.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from statistics import fmean

import grimp

FILE = Path(__file__).with_name("images") / "house.svg"
SOURCE = Path(__file__).parents[1] / "src" / "triptych"
GROUNDS = {
    "core": "errors, limits, ledger ...",
    "schedulers": "engine, timeline, batcher ...",
    "modalities": "modality, service, pipeline",
}
"""Labels of the modules that lie loose in a folder."""
BANDS = ("src/triptych", "modalities", "schedulers", "core")
"""Frames of the drawing, from the top; `core/runtime` is a frame within the last."""
WIDTH, MARGIN, HEAD, ROW, BOX = 1080, 18, 24, 54, 28
TORCH, SHIFT, SWEEPS = 470, 90, 30
STYLE = """
text { font: 14px ui-sans-serif, system-ui, sans-serif; fill: #1f2328; text-anchor: middle }
text.head { font-weight: 600; text-anchor: start } text.note { text-anchor: start; fill: #59636e }
.paper { fill: #ffffff } .frame { fill: #f3f5f7; stroke: #c8d0d8 }
.torch { fill: #fdf0e4; stroke: #e0b48c }
.room { fill: #ffffff; stroke: #59636e } .arrow { fill: none; stroke: #59636e; stroke-opacity: .55 }
marker path { fill: #59636e }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } text.note { fill: #9aa4ae } .paper { fill: #0d1117 }
  .frame { fill: #161b22; stroke: #39424d } .torch { fill: #2b2118; stroke: #7a5a3a }
  .room { fill: #22272e; stroke: #9aa4ae } .arrow { stroke: #9aa4ae } marker path { fill: #9aa4ae }
}"""
HEADER = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>The rooms of the code, and the imports between them</title>
<style>{style}
</style>
<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">
<path d="M0 0 8 4 0 8z"/></marker>
<rect class="paper" width="{width}" height="{height}" rx="10"/>
"""
NOTE = "An arrow: imports. Arrows that a chain of other arrows implies are left out."


def room_of(module: str) -> str:
    """The room of a module: a folder, the loose modules of a layer, or a process."""
    layer, *rest = module.split(".")[1:] or ["cli"]
    if layer not in GROUNDS:
        return "cli" if layer == "__main__" or layer.endswith("_cli") else layer
    if rest[:1] == ["registry"]:
        return "registry"
    depth = 2 if rest[:1] == ["runtime"] else 1
    is_loose = not SOURCE.joinpath(layer, *rest[:depth]).is_dir()
    return layer if is_loose or not rest[depth - 1 :] else ".".join((layer, *rest[:depth]))


def band_of(room: str) -> int:
    """The number of a room's frame, from the top."""
    layer = "modalities" if room == "registry" else room.split(".", maxsplit=1)[0]
    return BANDS.index(layer) if layer in BANDS else 0


def read_imports() -> dict[str, set[str]]:
    """The rooms that each room imports. Two rooms that import each other keep the first arrow."""
    graph = grimp.build_graph("triptych", cache_dir=None, exclude_type_checking_imports=True)
    below: dict[str, set[str]] = defaultdict(set)
    for module in sorted(graph.modules):
        imported = graph.find_modules_directly_imported_by(module)
        below[room_of(module)] |= {room_of(other) for other in imported} - {room_of(module)}
    for room in sorted(below):
        below[room] -= {other for other in below[room] if room in below[other] and other < room}
    return dict(below) | {"page": set()}


def reached_from(rooms: set[str], below: dict[str, set[str]]) -> set[str]:
    """All rooms that `rooms` import, directly or not, and `rooms` themselves."""
    found, left = set(rooms), list(rooms)
    while left:
        new = below[left.pop()] - found
        found |= new
        left += new
    return found


def reduce(below: dict[str, set[str]]) -> dict[str, set[str]]:
    """The arrows without those that a chain of other arrows implies."""
    return {
        room: {to for to in direct if to not in reached_from(direct - {to}, below)}
        for room, direct in below.items()
    }


def floors_of(below: dict[str, set[str]]) -> dict[str, int]:
    """The row of each room, from the top: under all rooms of its frame that import it."""
    floors: dict[str, int] = {}
    for band in range(len(BANDS)):
        rooms = {room for room in below if band_of(room) == band}
        highest = len(set(floors.values()))
        while rooms:
            ready = {room for room in rooms if not any(room in below[above] for above in rooms)}
            ready = ready or {min(rooms)}  # a circle is cut open at its first room
            for room in ready:
                above = [floors[a] for a in floors if room in below[a] and band_of(a) == band]
                floors[room] = max([highest - 1, *above]) + 1
            rooms -= ready
    return floors


def is_torch(room: str) -> bool:
    """Whether a room is part of `core/runtime`."""
    return room.startswith("core.runtime.")


def centers_of(
    floors: dict[str, int], below: dict[str, set[str]]
) -> dict[str, tuple[float, float]]:
    """The middle of each box. A row is ordered by the places of the rooms tied to its rooms."""
    ties = {room: below[room] | {a for a in below if room in below[a]} for room in below}
    x = dict.fromkeys(floors, WIDTH / 2)
    for _ in range(SWEEPS):
        wish = {room: fmean([x[other] for other in ties[room]] or [0]) for room in floors}
        for floor in set(floors.values()):
            torch = [room for room in floors if floors[room] == floor and is_torch(room)]
            spread(x, wish, torch, MARGIN * 2, TORCH)
            rooms = [room for room in floors if floors[room] == floor and not is_torch(room)]
            left = TORCH if torch else MARGIN * 2
            shift = SHIFT * (1 if floor % 2 else -1) if len(rooms) == 1 else 0
            spread(x, wish, rooms, left + shift, WIDTH - MARGIN * 2 + shift)
    return {room: (x[room], y_of(floor, band_of(room))) for room, floor in floors.items()}


def spread(
    x: dict[str, float], wish: dict[str, float], rooms: list[str], left: float, right: float
) -> None:
    """Set `x` of `rooms` evenly between two borders, in the order of their wishes."""
    for number, room in enumerate(sorted(rooms, key=lambda room: (wish[room], room))):
        x[room] = left + (right - left) * (number + 0.5) / len(rooms)


def y_of(floor: int, band: int) -> float:
    """The middle of a row; the heading of each frame above it takes room."""
    return MARGIN + floor * ROW + (band + 1) * HEAD + BOX / 2


def render() -> str:
    """The drawing as SVG."""
    below = read_imports()
    centers = centers_of(floors_of(below), reduce(below))
    parts = []
    for band, name in enumerate(BANDS):
        rooms = [room for room in below if band_of(room) == band]
        parts.append(frame(name, "frame", centers, rooms, MARGIN, WIDTH - MARGIN))
    torch = [room for room in below if is_torch(room)]
    parts.append(frame("core/runtime: torch", "torch", centers, torch, MARGIN * 1.5, TORCH))
    for room, direct in reduce(below).items():
        parts += [arrow(*centers[room], *centers[to]) for to in sorted(direct)]
    parts += [box(label, *centers[room]) for room in below for label in [label_of(room)]]
    height = max(y for _, y in centers.values()) + BOX * 2 + MARGIN
    parts.append(f'<text class="note" x="{MARGIN * 2}" y="{height - MARGIN:.0f}">{NOTE}</text>')
    header = HEADER.format(width=WIDTH, height=round(height), style=STYLE)
    return header + "\n".join(parts) + "\n</svg>\n"


def label_of(room: str) -> str:
    """The name of a room in the drawing."""
    return GROUNDS.get(room, room.rsplit(".", maxsplit=1)[-1])


def frame(
    name: str,
    style: str,
    centers: dict[str, tuple[float, float]],
    rooms: list[str],
    left: float,
    right: float,
) -> str:
    """A frame with a heading around the rows of `rooms`."""
    top = min(centers[room][1] for room in rooms) - BOX / 2 - HEAD
    height = max(centers[room][1] for room in rooms) + BOX - top
    return (
        f'<rect class="{style}" x="{left}" y="{top}" rx="8" '
        f'width="{right - left}" height="{height}"/>'
        f'<text class="head" x="{left + 12}" y="{top + 18}">{name}</text>'
    )


def box(label: str, x: float, y: float) -> str:
    """The box of a room."""
    width = 7.6 * len(label) + 22
    return (
        f'<rect class="room" x="{x - width / 2:.0f}" y="{y - BOX / 2}" width="{width:.0f}" '
        f'height="{BOX}" rx="5"/><text x="{x:.0f}" y="{y + 5}">{label}</text>'
    )


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    """A curve from the bottom of one box to the top of another."""
    y, to_y = y + BOX / 2, to_y - BOX / 2 - 3
    bend = min(40, (to_y - y) / 2)
    return (
        f'<path class="arrow" marker-end="url(#tip)" d="M{x:.0f} {y:.0f} '
        f'C{x:.0f} {y + bend:.0f} {to_x:.0f} {to_y - bend:.0f} {to_x:.0f} {to_y:.0f}"/>'
    )


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
