"""Fetch the source distributions that the exported patches are proved on, check them, and unpack them.

    python tools/fetch_sources.py [--out DIR] [NAME-VERSION ...]

Without names it fetches all of them. pip downloads, so its own configuration says from where, and it builds the metadata
of each, which runs the distribution's `setup.py` in an environment of its own. What is unpacked already is left alone.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / ".cache" / "upstream"
# A digest that differs means that the file is not the one that the patches were proved on.
SOURCES = {
    "accelerate-1.12.0": "70988c352feb481887077d2ab845125024b2a137a5090d6d7a32b57d03a45df6",
    "accelerate-1.15.0": "5654f8c5eaa0d4fa68b33e287a97765da6849bf6d51dcac874e73fbbddfb6134",
    "transformers-4.57.6": "55e44126ece9dc0a291521b7e5492b572e6ef2766338a610b9ab5afbb70689d3",
    "transformers-5.23.0": "19d647a4d5d903a7c644ca5cde2d86efc3dde7d8c687ae7988806ff2205efa71",
}
# The largest of them unpacks to 55 MB; an archive that claims far more is not one of them.
_LIMIT = 500 * 2**20


class UnsafeArchive(RuntimeError):
    """An archive is not the one that was expected, or would write outside of its folder; nothing of it was kept."""


def download(source: str, digest: str, folder: Path) -> Path:
    """Let pip download one source distribution, and return the file.

    Args:
        source: `name-version`.
        digest: The SHA-256 that the file must have, in hexadecimal.
        folder: An empty folder to download into.

    Raises:
        RuntimeError: pip failed, or did not leave exactly one file.
    """
    name, _, version = source.rpartition("-")
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{name}=={version} --hash=sha256:{digest}\n", "utf-8")
    # Only the package itself has to come as source: what builds its metadata may be a wheel.
    options = ["--no-deps", "--no-binary", name, "--require-hashes", "--quiet"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options]
    done = subprocess.run([*command, "-r", str(requirements), "-d", str(folder)], capture_output=True, text=True)
    found = sorted(folder.glob("*.tar.gz"))
    if done.returncode or len(found) != 1:
        raise RuntimeError(f"pip could not download the source of {source}:\n{done.stderr[-3000:]}")
    return found[0]


def verify(archive: Path, digest: str) -> None:
    """Compare a file with its digest.

    Raises:
        UnsafeArchive: They differ.
    """
    seen = hashlib.sha256(archive.read_bytes()).hexdigest()
    if seen != digest:
        raise UnsafeArchive(f"{archive.name} has the SHA-256 {seen}, expected {digest}. Do not use this file.")


def unpack(archive: Path, target: Path) -> None:
    """Unpack an archive with one folder at its top as `target`, all of it or nothing.

    Args:
        archive: A `.tar.gz`.
        target: The folder that is made; it must not exist.

    Raises:
        UnsafeArchive: A member is no plain file or folder, lies outside of that one folder, or the whole is too large.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename on one file system.
    staged = Path(tempfile.mkdtemp(prefix=".unpacking-", dir=target.parent))
    try:
        with tarfile.open(archive, "r:gz") as packed:
            members = packed.getmembers()
            _check(archive, members)
            for member in members:
                path = staged.joinpath(*PurePosixPath(member.name).parts[1:])
                if member.isdir():
                    path.mkdir(parents=True, exist_ok=True)
                    continue
                path.parent.mkdir(parents=True, exist_ok=True)
                with packed.extractfile(member) as content, path.open("xb") as file:
                    shutil.copyfileobj(content, file)
                path.chmod(0o755 if member.mode & 0o100 else 0o644)
        staged.chmod(0o755)
        staged.rename(target)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _check(archive: Path, members: list[tarfile.TarInfo]) -> None:
    tops = {PurePosixPath(member.name).parts[:1] for member in members}
    if len(tops) != 1:
        raise UnsafeArchive(f"{archive.name} has {len(tops)} entries at its top, expected one folder.")
    for member in members:
        path = PurePosixPath(member.name)
        if path.is_absolute() or ".." in path.parts or not (member.isfile() or member.isdir()):
            raise UnsafeArchive(
                f"{archive.name} has the member {member.name!r}, which is no plain file inside its folder."
            )
        if member.isfile() and len(path.parts) < 2:
            raise UnsafeArchive(f"{archive.name} has the file {member.name!r} at its top, expected one folder.")
    if sum(member.size for member in members) > _LIMIT:
        raise UnsafeArchive(f"{archive.name} would unpack to more than {_LIMIT} bytes.")


def fetch(source: str, out: Path) -> Path:
    """Return the unpacked source of one of `SOURCES`, fetched if it is not there.

    Args:
        source: A key of `SOURCES`.
        out: Where the folder of that name lies or is made.
    """
    target = out / source
    if not target.is_dir():
        with tempfile.TemporaryDirectory() as folder:
            archive = download(source, SOURCES[source], Path(folder))
            verify(archive, SOURCES[source])
            unpack(archive, target)
    return target


def main(arguments: list[str] | None = None) -> int:
    """Fetch what the command line names; return 1 if something could not be."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "sources", nargs="*", metavar="NAME-VERSION", help=f"known: {', '.join(SOURCES)}; default: all"
    )
    parser.add_argument("--out", type=Path, default=OUT, help="default: %(default)s")
    options = parser.parse_args(arguments)
    for source in options.sources or SOURCES:
        if source not in SOURCES:
            parser.error(f"{source!r} is not known; known are {', '.join(SOURCES)}")
        try:
            print(f"{source}: {fetch(source, options.out)}")
        except (RuntimeError, OSError, tarfile.TarError) as error:
            print(f"{source}: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
