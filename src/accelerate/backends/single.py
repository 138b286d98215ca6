"""One process: nothing to synchronise."""

from accelerate.backends.base import Backend


class SingleProcess(Backend):
    """The behaviour of one process, which is the contract's default."""

    name = "single"
