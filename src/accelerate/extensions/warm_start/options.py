"""Options of the launcher: ranks that are forked from a warm process."""

from accelerate.config.options.general import DISTRIBUTED
from accelerate.config.options.schema import Feature, rows

_runner = rows(DISTRIBUTED, key="", before="module")

OPTIONS = (
    _runner(
        "warm_start",
        "Fork the processes, restarted ones too, from one process of this machine that has imported torch (Linux).",
        default=False,
        switch=True,
    ),
    _runner("preload", "Further modules that this process imports: their names, separated by commas."),
)
# `preload` is a feature as well so that its runner is asked, and refuses it, without `warm_start`.
FEATURES = {
    "warm_start": Feature("A warm start", "warm_start", runners=("warm_start",)),
    "preload": Feature("Preloading modules", "preload", runners=("warm_start",)),
}
