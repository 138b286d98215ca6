"""Build the files of a release and prove them in a fresh environment.

    python tools/release.py --out dist

Writes the source distribution, the wheel, `SHA256SUMS` and `sbom.cdx.json` (CycloneDX) into the folder. The wheel is installed
into a new virtual environment, and `accelerate env`, `accelerate test` and the demo run there, outside of the checkout.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Neither belongs into an installed package.
FOREIGN = ("tests/", "benchmarks/", "examples/", "docs/", "tools/")


def run(*command: str, cwd: Path | None = None) -> str:
    """Run a program without the checkout on its path, and return what it prints; SystemExit names a failing one."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{process.stdout[-4000:]}{process.stderr[-4000:]}")
    return process.stdout


def check_contents(wheel: Path) -> int:
    """Compare the wheel with the checkout, and return its number of files; SystemExit names a missing or foreign one."""
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    required = sources | {"accelerate/py.typed", "transformers_patch/py.typed", "accelerate/extensions/methods.pyi"}
    foreign = [name for name in names if name.startswith(FOREIGN)]
    licences = [name for name in names if name.endswith(("/LICENSE", "/NOTICE"))]
    if missing := sorted(required - names):
        raise SystemExit(f"{wheel.name} lacks {missing[:5]}.")
    if foreign or len(licences) != 2:
        raise SystemExit(f"{wheel.name} has {foreign[:5]} and the licence files {licences}.")
    return len(names)


def prove(wheel: Path, constraints: Path) -> list[str]:
    """Install a wheel into a new environment and run it there; return one line for each proof."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "env", with_pip=True)
        python = str(folder / "env/bin/python")
        run(python, "-m", "pip", "install", "--quiet", "--constraint", str(constraints), str(wheel), "scikit-learn")
        accelerate = str(folder / "env/bin/accelerate")
        environment = run(accelerate, "env", cwd=folder)
        if "the independent fork" not in environment or "site-packages" not in environment:
            raise SystemExit(f"accelerate env does not name the installed fork:\n{environment}")
        run(accelerate, "test", cwd=folder)
        shutil.copytree(ROOT / "examples", folder / "examples")
        run(accelerate, "launch", "--cpu", "--num_processes", "2", "examples/prepare_twice.py", cwd=folder)
        digits = run(accelerate, "launch", "--cpu", "--num_processes", "2", "examples/digits.py", cwd=folder)
        return ["accelerate env: the independent fork", "accelerate test: passed", digits.strip().splitlines()[-1]]


def main() -> int:
    """Build, check and prove a release."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files; it is emptied")
    out = parser.parse_args().out.resolve()
    shutil.rmtree(out, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", str(out), str(ROOT))
    files = sorted(out.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, files))
    (wheel,) = out.glob("*.whl")
    print(f"{wheel.name}: {check_contents(wheel)} files")
    for line in prove(wheel, ROOT / "constraints.txt"):
        print(line)
    sbom = out / "sbom.cdx.json"
    run(sys.executable, "-m", "cyclonedx_py", "environment", "--output-file", str(sbom), sys.executable)
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in [*files, sbom]]
    (out / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    print(*sums, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
