"""Numbers as text: bytes, counts, rates, times and fractions, each in one format. Units are decimal: 1 MB = 10^6 bytes."""

import math

_BYTES = (" B", " kB", " MB", " GB", " TB", " PB")
_COUNTS = ("", "k", "M", "B", "T")


def format_bytes(number: float, digits: int = 3) -> str:
    """Bytes to `digits` significant digits: '512 B', '152 MB', '1.29 GB'; 'n/a' for nan."""
    return _scaled(number, _BYTES, digits)


def format_count(number: float, digits: int = 3) -> str:
    """A count to `digits` significant digits: '950', '8.1k', '1.3M', '6.74B'; 'n/a' for nan."""
    return _scaled(number, _COUNTS, digits)


def format_rate(tokens_per_second: float, digits: int = 3) -> str:
    """Tokens per second: '8.12k tok/s'."""
    return f"{format_count(tokens_per_second, digits)} tok/s"


def format_seconds(seconds: float) -> str:
    """A time to three significant digits: '7.70 s', '412 ms', '88 us'; '-' if not finite."""
    if not math.isfinite(seconds):
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= 0.9995 * size:
            value = seconds / size
            return f"{value:,.0f} {unit}" if value >= 999.5 else f"{value:#.3g}".rstrip(".") + f" {unit}"
    return f"{seconds * 1e6:.2g} us" if seconds else "0 s"


def format_duration(seconds: float) -> str:
    """A longer time in clock format: '0:07', '3:21', '2:03:21' or '3d 4:00:00'; '-' if not finite."""
    if not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(max(seconds, 0.0)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def format_percent(fraction: float) -> str:
    """A fraction as a percentage: '41.2%'; 'n/a' if not finite."""
    return f"{fraction:.1%}" if math.isfinite(fraction) else "n/a"


def _scaled(number: float, units: tuple[str, ...], digits: int) -> str:
    """`number` in the largest unit for which it is at least 1 after rounding."""
    if not math.isfinite(number):
        return "n/a"
    index = 0
    while index + 1 < len(units) and round(abs(number), max(digits - 3, 0)) >= 1000:
        number, index = number / 1000, index + 1
    if abs(number) >= 10 ** (digits - 1):
        return f"{number:,.0f}{units[index]}"
    return f"{number:.{digits}g}{units[index]}"
