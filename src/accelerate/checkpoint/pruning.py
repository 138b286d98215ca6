"""Which checkpoints of a folder may go, when somebody wants room: decided first, so that it can be told before it is done."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from accelerate.checkpoint import names
from accelerate.checkpoint.inspect import Summary, series_of, survey
from accelerate.checkpoint.storage import CheckpointStorage, LocalStorage, Stored


@dataclass(frozen=True)
class Pruning:
    """What is going to be removed.

    Attributes:
        folder: that was named.
        homes: the folders in which checkpoints lie: it, and the one in it.
        old: whole checkpoints that go.
        unfinished: checkpoints that are not whole, which go if `incomplete`.
        unread: those of which nobody here can tell whether they are, which stay.
        left: what saves and removals left behind, by location, which goes if `incomplete`.
        put_back: what they left of checkpoints, which is put in its place if `incomplete`.
        elsewhere: the folder in which checkpoints lie, too, if a link leads to it; nothing in it goes.
        incomplete: whether more goes than what is old.
    """

    folder: CheckpointStorage
    homes: list[CheckpointStorage]
    old: list[Summary]
    unfinished: list[Summary]
    unread: list[Summary]
    left: Mapping[str, Stored]
    put_back: Mapping[str, Stored]
    elsewhere: CheckpointStorage | None
    incomplete: bool

    @property
    def unwanted(self) -> list[Summary]:
        """The checkpoints that go."""
        return [*self.old, *(self.unfinished if self.incomplete else [])]

    @property
    def sweeps(self) -> list[CheckpointStorage]:
        """The folders from which what was left behind goes."""
        return self.homes if self.incomplete and (self.left or self.put_back) else []

    @property
    def count(self) -> int:
        """How many things go."""
        return len(self.unwanted) + (len(self.left) if self.sweeps else 0)

    @property
    def size(self) -> int:
        """Bytes of what goes."""
        left = sum(left.size for left in self.left.values()) if self.sweeps else 0
        return left + sum(one.size for one in self.unwanted)

    def written_since(self, time: float) -> list[str]:
        """Return what is not whole, or was left behind, and has been written to lately: somebody may be at work there.

        Args:
            time: in seconds since 1970.
        """
        times = {one.name: one.saved for one in self.unfinished}
        times |= {path: left.modified for path, left in {**self.left, **self.put_back}.items()}
        return [name for name, written in times.items() if written is not None and written > time]

    def as_agreed(self, now: "Pruning") -> "Pruning":
        """Return what there is to do by now, less what is not as it was when somebody agreed.

        Args:
            now: decided again.
        """

        def same(former: list[Summary], present: list[Summary]) -> list[Summary]:
            known = {(one.place, one.saved, one.state.kind) for one in former}
            return [one for one in present if (one.place, one.saved, one.state.kind) in known]

        return replace(now, old=same(self.old, now.old), unfinished=same(self.unfinished, now.unfinished))


def plan(folder: CheckpointStorage, keep: int, foreign: bool = False, incomplete: bool = False) -> Pruning:
    """Decide what is going to be removed. Nothing is changed.

    Args:
        folder: a project's folder, or a folder of checkpoints. Nothing outside of it goes.
        keep: how many whole checkpoints stay in each folder, at least one.
        foreign: count those without a manifest, too.
        incomplete: remove what is not whole, and what was left behind.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: `keep` is below one, or the folder is a checkpoint.
    """
    found = survey(folder)
    if not found and (state := folder.state()).kind == "absent":
        raise FileNotFoundError(f"{folder.location!r}: {state.reason}.")
    if [one.place for one in found] == [folder]:
        raise ValueError(f"{folder.location!r} is a checkpoint; name the folder that it lies in.")
    inner = folder.child(names.CHECKPOINTS_FOLDER)
    outside = inner.parent() != folder  # a link leads there
    homes = [folder] if outside else [folder, inner]
    found = [one for one in found if one.place.parent() in homes]
    left: dict[str, Stored] = {}
    put_back: dict[str, Stored] = {}
    for home in homes:
        gone, kept = leftovers(home)
        left |= gone
        put_back |= kept
    return Pruning(
        folder,
        homes,
        old=surplus(found, keep, foreign),
        unfinished=unfinished(found),
        unread=[one for one in found if one.unread and one.number is not None],
        left=left,
        put_back=put_back,
        elsewhere=inner if outside else None,
        incomplete=incomplete,
    )


def surplus(found: Iterable[Summary], keep: int, foreign: bool = False) -> list[Summary]:
    """Return the automatically named checkpoints that are older than the newest ones of their folder, oldest first.

    Args:
        found: what `survey` returned.
        keep: how many stay in each folder that has any, at least one.
        foreign: count, and return, those without a manifest, too; else they are left alone.

    Returns:
        Whole ones only. The newest one with a manifest is never among them.

    Raises:
        ValueError: `keep` is below one.
    """
    if keep < 1:
        raise ValueError(f"keep={keep} would remove every checkpoint; keep at least 1.")
    kinds = ("complete", "foreign") if foreign else ("complete",)
    old: list[Summary] = []
    for series in series_of(found).values():
        whole = [one for one in series if one.state.kind in kinds]
        newest = next((one for one in reversed(whole) if one.state.kind == "complete"), None)
        old += [one for one in whole[:-keep] if one is not newest]
    return old


def unfinished(found: Iterable[Summary]) -> list[Summary]:
    """Return the automatically named checkpoints whose saving did not come to its end, or which lost a file.

    Args:
        found: what `survey` returned.
    """
    return [one for one in found if one.number is not None and one.state.kind == "incomplete" and not one.unread]


def leftovers(folder: CheckpointStorage) -> tuple[dict[str, Stored], dict[str, Stored]]:
    """Return what saves and removals left behind among the checkpoints of a folder, or are at work on, by location.

    Args:
        folder: where the checkpoints are.

    Returns:
        What `CheckpointStorage.sweep` removes; and what it puts in its place, because that is the only copy there, or the newer one.
    """
    gone, kept = {}, {}
    for path, left in folder.leftovers().items():
        (kept if isinstance(folder, LocalStorage) and _is_put_back(folder, path) else gone)[path] = left
    return gone, kept


def _is_put_back(folder: LocalStorage, path: str) -> bool:
    name = os.path.basename(path)
    for prefix in (names.READY_PREFIX, names.REPLACED_PREFIX):
        if name.startswith(prefix):
            newer = prefix == names.READY_PREFIX and os.path.lexists(os.path.join(path, names.PUBLISHING_MARKER))
            return newer or folder.child(name.removeprefix(prefix)).fetch() == path
    return False
