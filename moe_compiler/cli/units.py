"""Numbers for people."""

from __future__ import annotations


def bytes_text(count: float) -> str:
    """`454 GB`: powers of ten, three digits."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB"))


def count_text(count: float) -> str:
    """`235 B`: powers of ten, three digits, without a unit."""
    return _scaled(count, ("", "K", "M", "B", "T")).strip()


def time_text(microseconds: float) -> str:
    """`52 ns`, `17.6 us`, `1.22 ms`, `3.40 s`."""
    for limit, factor, unit in (
        (1.0, 1e-3, "ns"),
        (1e3, 1.0, "us"),
        (1e6, 1e3, "ms"),
        (float("inf"), 1e6, "s"),
    ):
        if microseconds < limit:
            return f"{_digits(microseconds / factor)} {unit}"
    raise AssertionError("no time is that long")


def _scaled(count: float, units: tuple[str, ...]) -> str:
    place = 0
    while count >= 999.5 and place < len(units) - 1:
        count /= 1000
        place += 1
    text = f"{count:.0f}" if place == 0 else _digits(count)
    return f"{text} {units[place]}"


def _digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
