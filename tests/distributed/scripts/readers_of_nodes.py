"""A reader per node, with four processes that take themselves for two nodes."""

import os

LOCAL = 2
RANK = int(os.environ["RANK"])
os.environ.update(LOCAL_RANK=str(RANK % LOCAL), LOCAL_WORLD_SIZE=str(LOCAL))

from expect import raised  # noqa: E402
from harness import everywhere, fresh_accelerator, shared_folder  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset  # noqa: E402

from accelerate import DataLoaderConfiguration, skip_first_batches  # noqa: E402
from accelerate.data import plan  # noqa: E402


class Pieces(IterableDataset):
    """A stream that is stored in pieces; one of its samples cannot be read."""

    def __init__(self, pieces, error_at=None):
        self.pieces, self.error_at = pieces, error_at

    @property
    def num_shards(self):
        return len(self.pieces)

    def shard(self, num_shards, index):
        return Pieces(self.pieces[index::num_shards], self.error_at)

    def __iter__(self):
        assert RANK % LOCAL == 0, "only the first process of a node reads"
        for sample in (sample for piece in self.pieces for sample in piece):
            if sample == self.error_at:
                raise OSError(f"sample {sample}")
            yield sample


def prepared(*lengths, error_at=None, workers=0, **options):
    accelerator = fresh_accelerator(dataloader_config=DataLoaderConfiguration(dispatch_readers="per_node", **options))
    pieces = [list(range(100 * number, 100 * number + length)) for number, length in enumerate(lengths)]
    size = 8 if options else 2
    return accelerator, accelerator.prepare(DataLoader(Pieces(pieces, error_at), size, num_workers=workers))


def values(loader):
    return [batch.tolist() for batch in loader]


def check_each_node_reads_its_pieces():
    accelerator, loader = prepared(9, 9)
    found = accelerator.data_plan(loader)
    assert (found.reading, found.readers) == (plan.PER_NODE, (0, 2)) and "readers  ranks 0, 2" in str(found)
    for _ in range(2):
        own = everywhere(values(loader))
        # Node by node and step by step, each node's samples in the order of its pieces; the end filled with its first ones.
        assert own == [
            [[0, 1], [4, 5], [8]],
            [[2, 3], [6, 7], [0]],
            [[100, 101], [104, 105], [108]],
            [[102, 103], [106, 107], [100]],
        ]
    _, loader = prepared(8, 8, split_batches=True)
    assert everywhere(values(loader)) == [
        [[0, 1], [4, 5]],
        [[2, 3], [6, 7]],
        [[100, 101], [104, 105]],
        [[102, 103], [106, 107]],
    ]


def check_metrics_see_each_sample_once():
    for lengths in ((9, 9), (4, 5, 5, 4), (8, 7), (3, 7), (1, 1)):
        for workers in (0, 1):
            accelerator, loader = prepared(*lengths, workers=workers)
            seen = sum((accelerator.gather_for_metrics(batch).tolist() for batch in loader), [])
            nodes = [sum(lengths[0::2]), sum(lengths[1::2])]
            steps = min(-(-each // 4) for each in nodes)
            assert len(seen) == len(set(seen)) == sum(min(each, 4 * steps) for each in nodes), (lengths, seen)


def check_an_interrupted_epoch_goes_on():
    with shared_folder() as folder:
        accelerator, loader = prepared(13, 13)
        whole = values(loader)
        for number, _ in enumerate(loader):
            if number == 1:
                accelerator.save_state(folder)
                break
        accelerator, loader = prepared(13, 13)
        accelerator.load_state(folder)
        assert values(loader) == whole[2:], "with the same samples in the place of those that are not there"
        assert values(loader) == whole == values(loader)
        assert values(skip_first_batches(loader, 1)) == whole[1:]


def check_an_error_of_a_reader_reaches_all_nodes():
    _, loader = prepared(20, 20, error_at=106)
    with raised(*((OSError,) if RANK == 2 else (RuntimeError,)), "sample 106" if RANK >= 2 else "rank 2"):
        values(loader)
    assert everywhere(1) == [1] * 4


def check_what_nodes_cannot_divide_is_refused():
    with raised(ValueError, "dispatch_readers='per_node' is not possible on 2 nodes", "pieces"):
        prepared(8)
    config = DataLoaderConfiguration(dispatch_readers="per_node", dispatch_batches=True)
    with raised(ValueError, "dispatch_batches=False"):
        fresh_accelerator(dataloader_config=config).prepare(DataLoader(range(8)))
    with raised(ValueError, "dispatch_readers is 'two'", "per_node"):
        config = DataLoaderConfiguration(dispatch_readers="two", dispatch_batches=True)
        fresh_accelerator(dataloader_config=config).prepare(DataLoader(range(8)))


if __name__ == "__main__":
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            if RANK == 0:
                print("ok", name, flush=True)
