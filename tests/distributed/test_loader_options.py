"""Options of loaders that several processes have to agree on."""

import pytest


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_options_across_processes(launch, processes):
    assert "ok all" in launch("check_loader_options.py", processes=processes).stdout
