"""How downstream libraries are run: their real code on tiny random models, offline."""

import pytest

from interop.launching import figures, need_peer


@pytest.fixture
def run_ours(tmp_path):
    return lambda script, processes, *words: figures(script, tmp_path / "ours", processes, True, *words)


@pytest.fixture
def run_peer(tmp_path):
    need_peer()
    return lambda script, processes: figures(script, tmp_path / "peer", processes, ours=False)
