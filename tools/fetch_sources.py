"""Fetch the source distributions that the exported patches are proved on and whose test suites run here, and unpack them.

    python tools/fetch_sources.py [--out DIR] [NAME-VERSION ...]

Without names it fetches all of them. pip downloads, so its own configuration says from where, compares the digest, and builds the
metadata, which runs the distribution's `setup.py` in a separate environment. What is unpacked already is left alone.
"""

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

OUT = Path(__file__).resolve().parent.parent / ".cache" / "upstream"
# A digest that differs means that the file is not the one that the patches were proved on.
SOURCES = {
    "accelerate-1.12.0": "70988c352feb481887077d2ab845125024b2a137a5090d6d7a32b57d03a45df6",
    "accelerate-1.15.0": "5654f8c5eaa0d4fa68b33e287a97765da6849bf6d51dcac874e73fbbddfb6134",
    "transformers-4.57.6": "55e44126ece9dc0a291521b7e5492b572e6ef2766338a610b9ab5afbb70689d3",
    "pytorch_accelerated-0.1.61": "3a2c598fdf2f0f148be1a1388bfab7f04bb5f2b23cc1f69d6f8f6ffeb60668e6",
    "transformers-5.23.0": "19d647a4d5d903a7c644ca5cde2d86efc3dde7d8c687ae7988806ff2205efa71",
    "transformers-5.24.0": "906cb8c3cb2123575e263962586a4d21a979ce97feeb95fe6aaf66fe6ae88bf3",
}


def download(source: str, folder: Path) -> Path:
    """Let pip download one of `SOURCES` into an empty folder, and return the archive.

    Raises:
        RuntimeError: pip failed, for instance because the digest is another one.
    """
    name, _, version = source.rpartition("-")
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{name}=={version} --hash=sha256:{SOURCES[source]}\n", "utf-8")
    # Only the package itself has to come as source: what builds its metadata may be a wheel.
    options = ["--no-deps", "--no-binary", name, "--require-hashes", "--quiet"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", *options]
    done = subprocess.run([*command, "-r", str(requirements), "-d", str(folder)], capture_output=True, text=True)
    found = sorted(folder.glob("*.tar.gz"))
    if done.returncode or len(found) != 1:
        raise RuntimeError(f"pip could not download the source of {source}:\n{done.stderr[-3000:]}")
    return found[0]


def fetch(source: str, out: Path) -> Path:
    """Return the unpacked source of one of `SOURCES`, fetched if it is not there; `out` has or gets the folder of its name."""
    target = out / source
    if not target.is_dir():
        out.mkdir(parents=True, exist_ok=True)
        # Next to the target, so that the last step is a rename on one file system.
        with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=out) as folder:
            with tarfile.open(download(source, Path(folder))) as packed:
                packed.extractall(folder, filter="data")  # refuses what lies outside of the folder
            (Path(folder) / source).rename(target)
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
