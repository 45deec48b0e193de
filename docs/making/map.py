"""The drawing of the rooms: boxes by layer, and an arrow from each room to the rooms that it imports."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from . import inline
from .architecture import FOR_EDITORS, ROOMS, imports, modules, room_of

WIDTH, ROW, BOX, HIGH = 640, 76, 124, 40
COLUMNS = {"engine": 0.5, "integrations": 0.55, "curvature": 0.85}  # so that no arrow crosses a box; others: 0.26


def arrows() -> dict[tuple[str, str], int]:
    """How many imports there are from a room of another."""
    counted: dict[tuple[str, str], int] = {}
    for one in imports():
        pair = room_of(one.by), room_of(one.of)
        if pair[0] != pair[1] and (one.by, one.of) not in FOR_EDITORS:
            counted[pair] = counted.get(pair, 0) + 1
    return counted


def direct(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """The arrows that do not follow from others: no longer way leads from the one room to the other."""
    pairs = list(pairs)
    uses = {a: {b for x, b in pairs if x == a} for a, _ in pairs}

    def leads(a: str, b: str, seen: frozenset[str] = frozenset()) -> bool:
        return any(n == b or (n not in seen and leads(n, b, seen | {n})) for n in uses.get(a, ()))

    return [(a, b) for a, b in pairs if not any(n != b and leads(n, b) for n in uses[a])]


def layers() -> dict[str, int]:
    """The layer of each room: one above the highest that it may use."""
    found: dict[str, int] = {}
    for room, (_, below) in ROOMS.items():
        found[room] = 1 + max((found[one] for one in below), default=-1)
    return found


def places() -> dict[str, tuple[float, float]]:
    """The middle of each room's box. The room that nothing uses is at the top."""
    levels = layers()
    top = max(levels.values())
    return {room: (WIDTH * COLUMNS.get(room, 0.26), 30 + ROW * (top - level)) for room, level in levels.items()}


def svg() -> str:
    """The drawing."""
    at = places()
    count = {room: sum(room_of(module) == room for module in modules()) for room in ROOMS}
    parts = []
    for user, used in direct(arrows()):
        curve = _curve(at[user], at[used])
        parts.append(
            f"<path d='{curve}' fill='none' "
            "stroke='currentColor' stroke-opacity='0.55' stroke-width='1.3' marker-end='url(#map-tip)'/>"
        )
    for room, (x, y) in at.items():
        said = f"{count[room]} module{'s' if count[room] != 1 else ''}"
        parts += [
            f"<rect x='{x - BOX / 2:.0f}' y='{y - HIGH / 2:.0f}' width='{BOX}' height='{HIGH}' rx='6' class='room'/>",
            f"<text x='{x:.0f}' y='{y - 2:.0f}' text-anchor='middle' font-weight='600'>{escape(room)}</text>",
            f"<text x='{x:.0f}' y='{y + 13:.0f}' text-anchor='middle' font-size='11'>{said}</text>",
        ]
    tip = (
        "<defs><marker id='map-tip' viewBox='0 0 10 10' refX='8' refY='5' markerWidth='6' markerHeight='6' "
        "orient='auto'>"
        "<path d='M0 0L10 5L0 10z' fill='currentColor'/></marker></defs>"
    )
    height = 60 + ROW * max(layers().values())
    return (
        f"<svg class='chart' xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' role='img' "
        f"aria-label='The rooms of steppe and what each imports' font-size='13' fill='currentColor'>"
        f"{tip}{''.join(parts)}</svg>"
    )


def _curve(user: tuple[float, float], used: tuple[float, float]) -> str:
    """From box to box: straight down, or around the boxes between, out of one's side or into the other's."""
    (x, y), (u, v) = user, used
    bottom, top = y + HIGH / 2, v - HIGH / 2 - 5
    if x == u:
        return f"M{x:.0f} {bottom:.0f}V{top:.0f}"
    if x < u:
        return f"M{x + BOX / 2:.0f} {y:.0f}Q{u:.0f} {y:.0f} {u:.0f} {top:.0f}"
    return f"M{x:.0f} {bottom:.0f}Q{x:.0f} {v:.0f} {u + BOX / 2 + 5:.0f} {v:.0f}"


def markdown() -> str:
    """The drawing, and below it every arrow with its number of imports."""
    counted = arrows()
    lines = ["| room | modules | imports (how often) |", "|---|---|---|"]
    for room, (owns, _) in reversed(ROOMS.items()):
        names = ", ".join(f"`steppe.{own}`" if own else "`steppe`" for own in owns)
        used = ", ".join(f"{other} ({counted[room, other]})" for other in ROOMS if (room, other) in counted)
        lines.append(f"| {room} | {names} | {used} |")
    return "\n".join([inline(svg()), "", '??? note "Every import between rooms, counted"', "",
                      *(f"    {line}" for line in lines)])  # fmt: skip
