"""How downstream libraries are run: their real code on tiny random models, offline."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from interop.programs import PEER, figures


@pytest.fixture
def run_ours(tmp_path: Path) -> Callable[[str, int], dict[str, Any]]:
    """Run a script on this package."""
    return lambda script, processes: figures(sys.executable, script, tmp_path / "ours", processes, ours=True)


@pytest.fixture
def run_peer(tmp_path: Path) -> Callable[[str, int], dict[str, Any]]:
    """Run a script on the peer's wheel, in the environment that `make bench-peer` makes."""
    if not PEER.exists():
        pytest.skip("the peer's environment is not there; `make bench-peer` makes it")
    return lambda script, processes: figures(str(PEER), script, tmp_path / "peer", processes, ours=False)
