"""Bytes that each node reads from and writes to an object store: a sharded save and load of two nodes of two ranks.

object_store.py [LAYERS] ; prints RESULT {save: {...}, load: {...}} with one value for each node, and the bytes that it needs.

Files are read in full: each node also reads rank 0's file, which holds what all ranks read.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter

RANKS, LOCAL = 4, 2
URL = "counted://bucket/checkpoint"


def rank() -> None:
    """Train, save and load on one rank; the first one prints what all have counted."""
    import torch
    import torch.distributed as dist
    from counted_store import counts

    from accelerate import Accelerator
    from accelerate.checkpoint.storage import storage_of

    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(*[torch.nn.Linear(1536, 1536, bias=False) for _ in range(int(os.environ["LAYERS"]))])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.randn(2, 1536)).pow(2).mean())
    optimizer.step()

    def counted(name: str) -> None:
        every: list[Counter[str]] = [Counter() for _ in range(RANKS)]
        dist.all_gather_object(every, counts)
        nodes = [sum(every[first : first + LOCAL], Counter()) for first in range(0, RANKS, LOCAL)]
        result[name] = {key: [node[key] for node in nodes] for key in sorted(set().union(*nodes))}
        dist.barrier()
        counts.clear()

    result: dict[str, dict[str, list[int]]] = {}
    before = [value.to_local().clone() for value in model.parameters()]
    counts.clear()
    dist.barrier()
    accelerator.save_state(URL)
    counted("save")
    with torch.no_grad():
        for value in model.parameters():
            value.to_local().zero_()
    accelerator.load_state(URL)
    counted("load")
    assert all(torch.equal(value.to_local(), saved) for value, saved in zip(model.parameters(), before, strict=True))
    files = storage_of(URL).state().manifest.files
    shards = [0] * (RANKS // LOCAL)
    for name, entry in files.items():
        if name.endswith(".distcp"):
            shards[entry.rank // LOCAL] += entry.size
    common = sum(entry.size for name, entry in files.items() if not name.endswith(".distcp"))
    result["save"]["needed"] = shards
    result["load"]["needed"] = [size + common for size in shards]
    if accelerator.is_main_process:
        print("RESULT", json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def run(layers: int = 48) -> dict[str, dict[str, list[int]]]:
    """Start the ranks, and return what they counted."""
    from accelerate.utils.other import get_free_port

    here = os.path.dirname(os.path.abspath(__file__))
    with tempfile.TemporaryDirectory(prefix="counted_store") as store:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port()), "WORLD_SIZE": str(RANKS)}
        shared |= {
            "LOCAL_WORLD_SIZE": str(LOCAL),
            "COUNTED_STORE": store,
            "LAYERS": str(layers),
            "OMP_NUM_THREADS": "1",
        }
        shared |= {"ACCELERATE_USE_CPU": "true", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        shared |= {"FSDP_AUTO_WRAP_POLICY": "NO_WRAP", "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}
        shared["PYTHONPATH"] = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "rank"],
                env={**os.environ, **shared, "RANK": str(number), "LOCAL_RANK": str(number % LOCAL)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(RANKS)
        ]
        texts = [one.communicate(timeout=240)[0] for one in ranks]
        assert all(one.returncode == 0 for one in ranks), texts
    (line,) = [line for line in texts[0].splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        rank()
    else:
        print("RESULT", json.dumps(run(*map(int, sys.argv[1:])), indent=1))
