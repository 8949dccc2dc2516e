"""Numbers as a person reads them, the unit always beside the figure: GiB is 2^30 bytes, GB is 10^9."""


def size(n_bytes: float | None) -> str:
    """Bytes in memory, in binary units: 12.30 GiB."""
    if n_bytes is None:
        return "not known"
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(n_bytes) >= scale * 0.9995:
            value = n_bytes / scale
            return f"{value:,.{2 if abs(value) < 99.995 else 1 if abs(value) < 999.95 else 0}f} {unit}"
    return f"{n_bytes:.0f} B"


def rate(bytes_per_s: float) -> str:
    """Bytes a second, in decimal units as data sheets have them: 450 GB/s."""
    return f"{bytes_per_s / 1e9:,.4g} GB/s"


def duration(seconds: float | None) -> str:
    """Seconds from 1 s up, milliseconds below; three digits at least."""
    if seconds is None:
        return "not known"
    value, unit = (seconds, "s") if abs(seconds) >= 1 else (seconds * 1e3, "ms")
    large = abs(value)
    digits = 0 if large >= 1000 else 1 if large >= 100 else 2 if large >= 1 or not value else 3
    return f"{value:,.{digits}f} {unit}"


def long_time(seconds: float) -> str:
    """What is told in hours or days: 11.4 days, 5.2 hours, 40.0 minutes."""
    value, unit = next((seconds / scale, unit) for scale, unit in ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "s"))
                       if seconds >= 2 * scale or scale == 1)
    return f"{value:,.{1 if value < 1000 else 0}f} {unit}"


def share(part: float | None, whole: float | None = 1.0) -> str:
    """A ratio in percent."""
    if part is None or not whole:
        return "not known"
    return f"{100 * part / whole:.1f}%"


def count(n: float | None) -> str:
    return "not known" if n is None else f"{n:,.0f}"


def plural(n: int, one: str, many: str = "") -> str:
    """1 sequence, 8 sequences."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"
