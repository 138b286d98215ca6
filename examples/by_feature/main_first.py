"""Download and preprocess once, then let the other ranks read the result.

In `main_process_first()` the main process runs the block while the others wait, and then they run it and find the file there.
`local_main_process_first()` does it once per machine, for machines with separate disks. `on_main_process` makes a function do
nothing on other ranks; `wait_for_everyone` is a barrier.

    accelerate launch --cpu --num_processes 2 examples/by_feature/main_first.py

Prints: rank 0 built the cache, rank 1 read it, both have all topics: True
"""

import json
import pathlib
import pydoc_data.topics

from accelerate import Accelerator

CACHE = pathlib.Path("out/main_first/topics.json")


def load() -> tuple[dict[str, int], bool]:
    """Return the words of each topic of Python's documentation, and whether they were counted here."""
    if CACHE.exists():
        return json.loads(CACHE.read_text()), False
    counts = {name: len(text.split()) for name, text in pydoc_data.topics.topics.items()}  # a download, in real life
    CACHE.parent.mkdir(parents=True, exist_ok=True)
    CACHE.write_text(json.dumps(counts))
    return counts, True


def main() -> None:
    accelerator = Accelerator()

    @accelerator.on_main_process
    def clean() -> None:
        CACHE.unlink(missing_ok=True)

    clean()
    accelerator.wait_for_everyone()  # no rank looks before the old file is gone

    with accelerator.main_process_first():
        counts, built = load()

    of_ranks = accelerator.gather_for_metrics(
        [(accelerator.process_index, built, len(counts))], use_gather_object=True
    )
    accelerator.print(f"rank, built it, topics: {of_ranks}")
    builders = [rank for rank, built_there, _ in of_ranks if built_there]
    equal = len({count for _, _, count in of_ranks}) == 1 and len(counts) > 0
    accelerator.print(f"rank 0 built the cache, rank 1 read it, both have all topics: {builders == [0] and equal}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
