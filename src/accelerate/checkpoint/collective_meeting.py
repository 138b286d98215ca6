"""A meeting of ranks that have no key-value store, as on XLA: by the collectives of the training."""

from typing import Any

from accelerate import comm
from accelerate.checkpoint.meeting import CollectiveMisuse, Meeting, disagreement
from accelerate.runtime import whereabouts


class CollectiveMeeting(Meeting):
    """As `Meeting`, but whoever does not come is waited for as by any collective, and all of it belongs into the thread of the call.

    Args:
        kind, place, rank, world_size: as for `Meeting`.
    """

    def __init__(self, kind: str, place: str, rank: int, world_size: int) -> None:
        super().__init__(kind, place, rank, world_size, None)
        self.ranks = list(range(world_size))

    @property
    def in_background(self) -> bool:
        """Whether what comes after `begin` may run in a thread of its own."""
        return False

    def begin(self) -> None:
        """Wait until every rank has made the same call.

        Raises:
            CollectiveMisuse: some rank called something else, or with another path; raised on all ranks.
        """
        site = whereabouts.call_site()
        note = {"kind": self.kind, "place": self.place, "scope": "", "site": site, "name": self.name}
        notes = dict(enumerate(self.exchange(note)))
        problem = disagreement(notes)
        if problem is not None:
            raise CollectiveMisuse(problem)
        self.name = notes[0]["name"]

    def exchange(self, note: Any) -> list[Any]:
        """Return what every rank says, by rank. All ranks.

        Args:
            note: Anything that JSON can say.
        """
        return comm.current().gather_object(note)
