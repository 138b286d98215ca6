"""Verifying a checkpoint: files are compared with the digests in the manifest before a rank reads them, each piece once.

The ranks of a machine share the files that all of them read. What only one rank reads it hashes alone: its own files, and the pieces of
shards that its readers ask for.
"""

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from accelerate.checkpoint import manifest
from accelerate.checkpoint.manifest import DamagedCheckpoint, FileEntry, Manifest, damaged
from accelerate.runtime import durable

Path = str | os.PathLike[str]

# Files, all of each or, for those that map to some, the ranges of bytes in them.
Ranges = Iterable[str] | Mapping[str, Iterable[tuple[int, int]] | None]


class CheckpointFolder(os.PathLike[str]):
    """A local folder of a checkpoint, whose files are compared with its manifest before they are read.

    Attributes:
        path: The folder.
        listing: The manifest; an empty one where the checkpoint has none, so that nothing is compared.
        reader: The number of this rank among those of its machine, and how many they are; they share the work.
        bring: Makes sure that files are in the folder, as `CheckpointStorage.bring` does.
        wrong: A line for each file that `check` has refused.
    """

    def __init__(
        self,
        path: str,
        listing: Manifest,
        reader: tuple[int, int] = (0, 1),
        bring: Callable[[dict[str, int]], None] = lambda sizes: None,
    ) -> None:
        self.path, self.listing, self.reader, self.bring = path, listing, reader, bring
        self.wrong: list[str] = []
        self._hashed: dict[str, set[int]] = {}
        self._entries: dict[str, FileEntry] = {}

    def __fspath__(self) -> str:
        return self.path

    def __str__(self) -> str:  # as messages put folders into texts
        return self.path

    def __repr__(self) -> str:
        return repr(self.path)

    def files(self) -> Collection[str]:
        """Return the files by their paths within the folder; without a manifest the entries of the folder."""
        return self.listing.files or os.listdir(self.path)

    def entries(self, names: Iterable[str]) -> Mapping[str, FileEntry]:
        """Return full entries by name: of these files, if they are listed, and of others; the part of a rank is read once."""
        files, ranks = self.listing.files, set()
        for name in names:
            if name in files and name not in self._entries:
                ranks.add(files[name].rank)
        if ranks:
            parts = [name for name in map(manifest.part_file, ranks) if name in files]
            self.bring({name: files[name].size for name in parts})
            theirs = [name for name, entry in files.items() if entry.rank in ranks]
            self._entries.update(self.listing.detailed(self, theirs))
        return self._entries

    def check(self, ranges: Ranges, shared: bool = False) -> None:
        """Raise DamagedCheckpoint with what `differences` returns, and keep it in `wrong`."""
        if lines := self.differences(ranges, shared):
            self.wrong += lines
            raise damaged(self, lines)

    def differences(self, ranges: Ranges, shared: bool = False) -> list[str]:
        """Hash pieces of files; return a line for each file that is not what was written.

        Pieces that were hashed before are skipped. If `shared`, all ranks of the machine ask for the same ones, and each hashes a part.
        """
        ranges = ranges if isinstance(ranges, Mapping) else dict.fromkeys(ranges)
        # Of each piece that none has hashed, its file and number, behind what they are sorted by: the largest come first, by turns.
        pieces: list[tuple[bool, int, str, int]] = []
        try:
            entries = self.entries(ranges)
            for name, spans in ranges.items():
                if (entry := entries.get(name)) is None:
                    continue
                numbers = {0}  # a file without digests of pieces is one piece
                if entry.digests:
                    spans = [(0, entry.size)] if spans is None else spans
                    numbers = {
                        n for start, stop in spans for n in range(start // durable.CHUNK, -(-stop // durable.CHUNK))
                    }
                hashed = self._hashed.setdefault(name, set())
                for number in numbers - hashed:
                    pieces.append((bool(entry.digests), -entry.size, name, number))
                hashed |= numbers
            reader, readers = self.reader if shared else (0, 1)
            own: dict[str, list[int]] = {}
            for _, _, name, number in sorted(pieces)[reader::readers]:
                own.setdefault(name, []).append(number)
            if not own:
                return []
            self.bring({name: entries[name].size for name in own})
            return self._changed(own)
        except DamagedCheckpoint as error:
            return [str(error)]

    def _changed(self, pieces: Mapping[str, Sequence[int]]) -> list[str]:
        """Hash pieces of files, and return a line for each file that is not what was written."""
        lines, threads = [], durable.threads()
        for name, numbers in pieces.items():
            entry, path = self._entries[name], os.path.join(self.path, *name.split("/"))
            try:
                if (size := durable.require_file(path)) != entry.size:
                    lines.append(manifest.difference(name, entry.size, size))
                elif not entry.digests:
                    digests = durable.digests(path, range(0, size, durable.CHUNK), size, threads)
                    lines += manifest.changed(name, entry, durable.combined(digests))
                else:
                    digests = durable.digests(path, [number * durable.CHUNK for number in numbers], size, threads)
                    written = [entry.digests[32 * number : 32 * number + 32] for number in numbers]
                    lines += [
                        f"{name} has changed: the checksum of its piece {number} is {digest.hex()}, but {digest_written} was written"
                        for number, digest, digest_written in zip(numbers, digests, written, strict=True)
                        if digest.hex() != digest_written
                    ][:1]
            except OSError as error:
                lines.append(f"{name} could not be read: {error}")
        return lines


def with_manifest(folder: Path) -> CheckpointFolder:
    """Return a folder that is compared with its manifest, with an empty one if it has none. Not a collective."""
    if isinstance(folder, CheckpointFolder):
        return folder
    has_one = os.path.isfile(os.path.join(folder, manifest.NAME))
    return CheckpointFolder(os.fspath(folder), Manifest.read(folder) if has_one else Manifest({}))


# The files of one rank each, with its number; and files of models and optimizers that ranks read in part, or not at all.
_OF_RANK = re.compile(
    r"(?:random_states|generators)_([0-9]+)\.\w+|rank([0-9]+)_dl_state_dict(?:_[0-9]+)?\.bin"
    r"|(?:pytorch_model_fsdp|optimizer)(?:_[0-9]+)?_rank([0-9]+)\.bin"
)
_SHARDS = re.compile(r"[^/]+/(?:__[0-9]+_[0-9]+\.distcp|[^/]*_states\.pt)")


def verify(folder: CheckpointFolder, rank: int, by_shards: bool) -> list[str]:
    """Hash this rank's share of the files that all ranks of the machine read, and the files that only this rank reads.

    Return a line for each file that is not what was written. With `by_shards`, readers verify the shards that they read. Not a collective.
    """
    files = folder.listing.files
    owners = {name: int(match[match.lastindex or 0]) for name in files if (match := _OF_RANK.fullmatch(name))}
    # A rank that did not exist when the checkpoint was saved reads the random states of the first one.
    substitute = rank if manifest.random_states_file(rank) in files else 0
    others = {*owners, *(filter(_SHARDS.fullmatch, files) if by_shards else ())}
    parts = f"{manifest.PARTS_FOLDER}/"
    of_all = [name for name in files if name not in others and not name.startswith(parts)]
    own = [name for name, owner in owners.items() if owner in (rank, substitute)]
    return folder.differences(of_all, shared=True) + folder.differences(own)
