"""What a release promises is said once and holds: the table of versions, the version number, the matrices of continuous integration."""

import re
import subprocess
import sys

import pytest
import yaml

from architecture import source

ROOT = source.ROOT
WORKFLOWS = ROOT / ".github/workflows"


def text(name: str) -> str:
    return (ROOT / name).read_text("utf-8")


def table() -> dict[str, tuple[str, list[str]]]:
    """Return, for each row of the table of versions, its lower bound and the releases of continuous integration."""
    section = text("docs/support.md").split("\n## Versions\n")[1].split("\n## ")[0].split("\nLimits of older torch")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert rows[0] == ["what", "supported", "continuous integration", "run here"]
    found = {}
    for what, supported, integration, _ in rows[2:]:
        bound = re.fullmatch(r"([\d.]+) and newer", supported)
        found[what] = (bound[1] if bound else "", re.findall(r"\d+(?:\.\d+)+", integration))
    return found


def matrix(job: str, key: str) -> list[str]:
    return yaml.safe_load((WORKFLOWS / "tests.yml").read_text("utf-8"))["jobs"][job]["strategy"]["matrix"][key]


def variable(name: str) -> list[str]:
    return re.search(rf"^{name} *:= (.+)$", text("Makefile"), re.M)[1].split()


@pytest.mark.parametrize("library", ["torch", "transformers", "deepspeed"])
def test_lower_bounds_of_the_table_are_those_of_the_package(library):
    bounds = set(re.findall(rf'"{library}>=([\d.]+)"', text("setup.py")))
    assert bounds == {{name.lower(): bound for name, (bound, _) in table().items()}[library]}


def test_python_of_the_table_is_that_of_the_package():
    bound, releases = table()["Python"]
    assert re.findall(r'python_requires=">=([\d.]+)"', text("setup.py")) == [bound]
    assert re.findall(r'Python :: (3\.\d+)"', text("setup.py")) == releases
    assert releases[0] == bound


def test_matrices_are_the_table():
    rows = table()
    assert matrix("test", "python") == rows["Python"][1]
    assert matrix("versions", "torch") == variable("TORCH_VERSIONS") == rows["torch"][1]
    assert matrix("transformers", "release") == variable("TRANSFORMERS_VERSIONS") == rows["transformers"][1]
    # Each tested release is inside of the range, and the oldest is its lower bound.
    for name in ("torch", "transformers"):
        bound, (oldest, *_) = rows[name]
        assert oldest == bound or oldest.startswith(f"{bound}.")


def test_support_page_is_generated_and_every_proof_exists():
    support = yaml.safe_load(text("docs/support.yaml"))
    assert subprocess.run([sys.executable, "tools/support.py", "--check"], cwd=ROOT).returncode == 0, (
        "run tools/support.py"
    )
    targets = set(re.findall(r"^([\w-]+?)(?:-%)?:", text("Makefile"), re.M))
    for run in support["runs"]:
        assert any(run["target"] == target or run["target"].startswith(f"{target}-") for target in targets), run
    proofs = {row["proof"] for table in support["tables"] for row in [table, *table["rows"]] if "proof" in row}
    for table in support["tables"]:
        for row in table["rows"]:
            name, *cells = row["row"] if isinstance(row, dict) else row
            proof = row.get("proof", table["proof"]) if isinstance(row, dict) else table["proof"]
            if "ci" in cells:  # such a target runs on every change, and not all tests of such a file are slow
                assert not proof.startswith("make ") or proof in text(".github/workflows/tests.yml"), name
                assert not (proof.endswith(".py") and re.search(r"^pytestmark = .*slow", text(proof), re.M)), name
    targets = set(re.findall(r"^([\w-]+):", text("Makefile"), re.M))
    missing = [proof for proof in proofs if not (proof.removeprefix("make ") in targets or (ROOT / proof).exists())]
    assert missing == []


def test_workflows_call_targets_that_are_there():
    """Every workflow is valid YAML with jobs that run on something, stop in time, and call what the Makefile has."""
    makefile = text("Makefile")
    for path in sorted(WORKFLOWS.glob("*.yml")):
        workflow = yaml.safe_load(path.read_text("utf-8"))
        # YAML 1.1 reads the key `on` as a truth value.
        assert {"name", True, "permissions", "jobs"} <= set(workflow), path.name
        limit = 350 if "schedule" in workflow[True] else 90  # it runs at night
        for name, job in workflow["jobs"].items():
            assert job["runs-on"] and job["steps"], name
            commands = "\n".join(step.get("run", "") for step in job["steps"])
            assert not commands.strip() or job["timeout-minutes"] <= limit, name
            for target in re.findall(r"\bmake ([a-z-]+)", commands):
                # The part behind the last dash comes from a matrix.
                assert re.search(rf"^{target}(?:%|:)", makefile, re.M), f"{path.name}: make {target}"


def test_changelog_lists_the_release_and_what_comes_after_it():
    version = re.search(r'^__version__ = "(.+)"$', text("src/accelerate/__init__.py"), re.M)[1]
    assert re.fullmatch(r"\d+\.\d+\.\d+\+fork\.\d+", version)
    headings = re.findall(r"^## \[(.+?)\]", text("CHANGELOG.md"), re.M)
    assert headings[:2] == ["Unreleased", version]
    # The first part is the release whose interface is recorded.
    upstream = version.split("+")[0]
    assert (ROOT / f"tests/architecture/record/accelerate-{upstream}.json").is_file()
    assert variable("PEER") == [f".cache/peer/{upstream}"]
