"""Suites of downstream libraries, from their source distributions: each test ends alike on this package and on the peer's wheel.

Of the libraries that train with accelerate, the registry has the trainer's tests of pytorch-accelerated alone: the source
distributions of transformers, TRL, diffusers and sentence-transformers omit theirs.
"""

import sys
from xml.etree import ElementTree

import pytest

from interop.launching import ROOT, finished, need, need_peer, on_peer

pytestmark = [pytest.mark.slow, pytest.mark.interop]
# By source distribution: the folder of its tests, how many pass, and which packages they need.
SUITES = {"pytorch_accelerated-0.1.61": ("test", 118, ("pytest_mock",))}


def outcomes(source, tests, report, variables):
    """Run a suite, and return how each of its tests ended, and the file of the accelerate that it ran on."""
    variables = {**variables, "PYTHONPATH": f"{variables.get('PYTHONPATH', '')}:{source}"}
    used = finished([sys.executable, "-c", "import accelerate; print(accelerate.__file__)"], cwd=source, **variables)
    pytest_of_it = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    finished([*pytest_of_it, f"--junitxml={report}"], cwd=source, **variables)
    ended = {}
    for case in ElementTree.parse(report).iter("testcase"):
        kinds = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        ended[f"{case.get('classname')}::{case.get('name')}"] = kinds[0] if kinds else "passed"
    return ended, used.stdout.strip()


@pytest.mark.parametrize("name", SUITES)
def test_every_test_ends_as_on_the_peer(name, tmp_path):
    tests, number, packages = SUITES[name]
    need(*packages)
    need_peer()
    source = ROOT / ".cache" / "upstream" / name
    if not source.exists():
        pytest.skip(f"{name} is not there; `make bench-peer` fetches it")
    ours, own_file = outcomes(source, tests, tmp_path / "ours.xml", {})
    theirs, peer_file = outcomes(source, tests, tmp_path / "theirs.xml", on_peer())
    assert "peer" in peer_file and own_file != peer_file
    assert ours == theirs
    assert list(ours.values()).count("passed") == number
