"""What other programs take from a measurement."""

import psutil

FEW = 0.2  # cores; a machine's own services take less


def cores_of_others(seconds: float = 5) -> float:
    """Return how many cores are used while this program waits: call it before the first run.

    The load average won't do, because it includes what the benchmark itself ran in the minute before.
    """
    used = psutil.cpu_percent(interval=seconds) / 100 * psutil.cpu_count()
    return round(used, 1) if used > FEW else 0.0
