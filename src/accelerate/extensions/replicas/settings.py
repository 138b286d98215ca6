"""The settings of replica groups that train together through torchft."""

import os
from dataclasses import dataclass
from typing import Any

from accelerate.config.handlers import KwargsHandler

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
# Variables that torchft prefers to the arguments of its manager.
_OVERRIDES = {"timeout_s": "TORCHFT_TIMEOUT_SEC", "quorum_timeout_s": "TORCHFT_QUORUM_TIMEOUT_SEC"}


@dataclass
class FaultToleranceKwargs(KwargsHandler):
    """Train as one of several replica groups, which continue without a group that fails. Each group is one ``accelerate launch``.

    Args:
        lighthouse: Address of torchft's lighthouse, such as ``"http://host:29510"``; by default the variable ``TORCHFT_LIGHTHOUSE``.
        min_replicas: Fewest replica groups that take a step; with fewer, a step waits.
        timeout_s: Longest time of one exchange between groups, and of a recovery, in seconds.
        quorum_timeout_s: Longest time that a step waits for the other groups, in seconds.
        replica_id: Name of this group in the lighthouse's status page; by default a random one.
        backend: ``"gloo"`` or ``"nccl"`` between the groups; by default the one of the device.
        data_seed: The order of the samples of an epoch follows from this number and the epoch. All groups pass the same one.

    Raises:
        ValueError: A number is not positive, the backend is unknown, or an environment variable of torchft would override a setting.

    Example:
        >>> FaultToleranceKwargs(lighthouse="http://localhost:29510", min_replicas=2).to_kwargs()
        {'lighthouse': 'http://localhost:29510', 'min_replicas': 2}
    """

    lighthouse: str | None = None
    min_replicas: int = 1
    timeout_s: float = 60.0
    quorum_timeout_s: float = 600.0
    replica_id: str | None = None
    backend: str | None = None
    data_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("min_replicas", "timeout_s", "quorum_timeout_s"):
            value: Any = getattr(self, name)
            if value <= 0:
                raise ValueError(f"FaultToleranceKwargs got {name}={value!r}. Pass a positive number.")
        if self.backend not in (None, "gloo", "nccl"):
            raise ValueError(f"FaultToleranceKwargs got backend={self.backend!r}. Pass 'gloo' or 'nccl', or omit it.")
        for name, variable in _OVERRIDES.items():
            if os.environ.get(variable):
                raise ValueError(
                    f"{variable}={os.environ[variable]!r} is set, and torchft would use it instead of {name}={getattr(self, name)!r}. "
                    f"Unset the variable, and pass FaultToleranceKwargs({name}=...)."
                )

    def address(self) -> str:
        """Return the lighthouse's address; ValueError if there is none.

        Not a collective.
        """
        address = self.lighthouse or os.environ.get(LIGHTHOUSE)
        if not address:
            raise ValueError(
                f"FaultToleranceKwargs(lighthouse=None) was given, and the variable {LIGHTHOUSE} is not set. Start `torchft_lighthouse "
                "--min_replicas 1` on one host, and pass its address, such as 'http://host:29510'."
            )
        return address
