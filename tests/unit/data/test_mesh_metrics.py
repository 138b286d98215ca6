"""What an evaluation loop gathers where a device mesh gives several ranks the same batch; the exchange is played by the test."""

from types import SimpleNamespace

import pytest
import torch

from accelerate.comm import operations
from accelerate.training import metrics

MESHES = {
    # Two shards of the data; both ranks of a pair have the same batch. Real samples: all of shard 0, one of shard 1.
    "tensor parallel": (SimpleNamespace(non_data_parallel_size=2, tp_size=2, pp_size=1), [0, 1, 2]),
    "shared sequences": (SimpleNamespace(non_data_parallel_size=2, tp_size=1, pp_size=1), [0, 1, 0, 1, 2, 2]),
}


@pytest.mark.parametrize("objects", [False, True])
@pytest.mark.parametrize(("counts", "end"), [(None, True), ([2, 1], False)], ids=["last round", "round of a stream"])
@pytest.mark.parametrize("name", MESHES)
def test_what_fills_up_a_round_is_dropped_from_each_rank_of_a_mesh(monkeypatch, name, counts, end, objects):
    layout, expected = MESHES[name]
    parts = [torch.tensor(part) for part in ([0, 1], [0, 1], [2, 9], [2, 9])]
    state = SimpleNamespace(
        active_dataloader=SimpleNamespace(batch_counts=counts), end_of_dataloader=end, remainder=3 if end else -1
    )
    accelerator = SimpleNamespace(
        gradient_state=state,
        _communicator=None,
        parallelism_config=layout,
        torch_device_mesh=object(),
        num_processes=4,
    )
    everything = torch.cat(parts).tolist() if objects else torch.cat(parts)
    monkeypatch.setattr(operations, "gather_object_with" if objects else "gather_with", lambda *_: everything)
    gathered = metrics.gather_for_metrics(accelerator, parts[0], objects)
    assert (gathered if objects else gathered.tolist()) == expected
