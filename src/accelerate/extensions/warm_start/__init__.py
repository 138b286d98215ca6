"""Ranks that are forked, for each attempt, from one process of the machine that has imported torch."""

from accelerate.extension import Spec

_HERE = "accelerate.extensions.warm_start"

SPEC = Spec("warm_start", options=f"{_HERE}.options", runners={"warm_start": f"{_HERE}.runner"})
