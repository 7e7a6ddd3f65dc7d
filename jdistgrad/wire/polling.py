"""How a thread that polls paces itself: pure arithmetic.

At first it looks without pause, where its core would idle otherwise: waking a sleeping core costs 15 to 40 us. Then it
naps for a fixed share of the time nothing has happened, so that what comes after ``t`` seconds is noticed at most
``t / SHARE`` late: 6 % of whatever the other side was doing. An idle worker costs about 2 % of a core.
"""

SPIN = 1e-3
SHORTEST = 20e-6
LONGEST = 1e-3
SHARE = 16


def nap(quiet: float, *, may_spin: bool) -> float:
    """Seconds to sleep when nothing has happened for ``quiet`` seconds; 0: look again at once."""
    if may_spin and quiet < SPIN:
        return 0.0
    return min(LONGEST, max(SHORTEST, quiet / SHARE))
