"""Copies of the training state in a peer's memory, from which restarted ranks resume."""

from accelerate.extension import Spec

_HERE = "accelerate.extensions.peer_memory"

SPEC = Spec(
    "peer_memory",
    extension=f"{_HERE}.copies:PeerMemory",
    attaches=lambda run: getattr(run, "peer_memory_handler", None) is not None,
    late=False,
    methods={"resume_from_memory": f"{_HERE}.resume:resume_from_memory"},
    handlers={"peer_memory_handler": f"{_HERE}.options:PeerMemoryKwargs"},
)
