"""Fit the constants of costmodel's profiles to measurements, and say how sure they are.

`fit` turns evidence (anything measured that the cost model can price: a step, a kernel, a collective) into constants with standard
errors; `evidence` reads records and probes; `probe` measures a machine; `profiles` writes what was found. Needs scipy.
"""


class ScipyMissing(ImportError):
    """The fit needs scipy."""

    def __init__(self) -> None:
        super().__init__("calibrate needs scipy. Install it with: pip install 'costmodel[calibrate]'")


def require_scipy() -> None:
    """Raise ScipyMissing where scipy is not installed."""
    try:
        import scipy  # noqa: F401
    except ImportError:
        raise ScipyMissing from None
