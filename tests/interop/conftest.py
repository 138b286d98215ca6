"""How downstream libraries are run: their real code on tiny random models, offline."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from interop.programs import NO_PEER, PEER, figures


@pytest.fixture
def run_ours(tmp_path: Path) -> Callable[[str, int], dict[str, Any]]:
    """Run a script on this package."""
    return lambda script, processes: figures(script, tmp_path / "ours", processes, ours=True)


@pytest.fixture
def run_peer(tmp_path: Path) -> Callable[[str, int], dict[str, Any]]:
    """Run a script on the peer's wheel."""
    if not PEER.exists():
        pytest.skip(NO_PEER)
    return lambda script, processes: figures(script, tmp_path / "peer", processes, ours=False)
