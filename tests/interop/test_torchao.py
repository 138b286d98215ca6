"""torchao's 8-bit AdamW on shards of FSDP2: trains as on one process, saved and loaded on any number of ranks."""

import pytest

from interop.launching import figures, need

pytestmark = pytest.mark.interop
BOTH = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]
FROM_TWO = [(2, ["train"]), (1, ["load", *BOTH])]
# Shards of three ranks are uneven.
FROM_MORE = [(2, ["train"]), (3, ["load", *BOTH]), (1, ["load", "by_3"]), (2, ["load", "by_1", "by_3"])]


@pytest.mark.slow
@pytest.mark.parametrize("runs", [FROM_TWO, FROM_MORE])
def test_eight_bit_states_go_on_on_any_ranks(tmp_path, runs):
    need("torchao")
    for processes, words in runs:
        assert figures("low_bit.py", tmp_path, processes, True, *words)["passed"]
