"""torchao's 8-bit AdamW on shards of FSDP2: trains as on one process, saved and loaded on any number of ranks."""

import pytest

from interop.programs import figures, need

pytestmark = pytest.mark.interop
BOTH = ["SHARDED_STATE_DICT", "FULL_STATE_DICT"]


def test_eight_bit_states_go_on_on_any_ranks(tmp_path):
    need("torchao")
    for processes, words in (
        (2, ["train"]),
        (3, ["load", "SHARDED_STATE_DICT"]),
        (1, ["load", *BOTH, "by_3"]),
        (2, ["load", "by_1"]),
    ):
        assert figures("low_bit.py", tmp_path, processes, True, *words)["passed"]
