"""The headers of messages, with ranks as threads and an `all_gather` that refuses unequal sizes."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelerate.comm import check
from accelerate.comm.base import Communicator
from accelerate.comm.check import GATHER_INLINE, DistributedOperationException, Post
from cases import cases

CPU = torch.device("cpu")


class World:
    """Ranks as threads; counts collectives, and fails where sizes differ, as a real one would hang or abort."""

    def __init__(self, size):
        self.size, self.collectives = size, 0
        self.barrier = threading.Barrier(size, timeout=20)
        self.vectors = [None] * size

    def gather_into(self, rank):
        def gather(output, vector, later=False):
            self.vectors[rank] = vector.clone()
            self.barrier.wait()
            sizes = {item.numel() for item in self.vectors}
            assert len(sizes) == 1, f"unequal sizes: {sizes}"
            output.copy_(torch.cat(self.vectors))
            if self.barrier.wait() == 0:
                self.collectives += 1
            return (lambda: None) if later else None

        return gather

    def run(self, function):
        """Call `function(rank, post)` on every rank and return what each returned or raised."""
        results = [None] * self.size

        def work(rank):
            try:
                results[rank] = function(rank, Post(self.size, self.gather_into(rank)))
            except BaseException as error:
                results[rank] = error
                if not isinstance(error, DistributedOperationException):
                    self.barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        return results


def gather(post, tensors, structure=None, operation="gather"):
    letter = post.letter(operation, structure, tensors, GATHER_INLINE)
    outcome = post.exchange(letter, tensors, CPU)
    if outcome.views is not None:
        return [view.clone().flatten(0, 1) for view in outcome.views]
    return outcome.gathered or [post.gather_large(tensor.contiguous()) for tensor in tensors]


def test_repeated_exchanges_settle_at_one_collective_each():
    world = World(2)

    def work(rank, post):
        for _ in range(5):
            (big,) = gather(post, [torch.full((5000,), float(rank))])
            (small,) = gather(post, [torch.tensor([rank])])
            assert big.view(2, 5000).mean(1).tolist() == [0.0, 1.0] and small.tolist() == [0, 1]

    assert world.run(work) == [None, None]
    assert world.collectives == 5 * 2 + 2  # the large one did not fit until it was known what it follows


@cases(
    "first, second, fragments",
    ([torch.ones(2)], [torch.ones(3)], ("float32[2]", "float32[3]")),
    ([torch.ones(2)], [torch.ones(2, dtype=torch.float64)], ("float32[2]", "float64[2]")),
    ([torch.ones(2)], [torch.ones(2, 1)], ("float32[2]", "float32[2, 1]")),
    ([torch.ones(2)], [torch.ones(2)] * 2, ("float32[2], float32[2]",)),
    ([torch.ones(70000)], [torch.ones(9)], ("float32[70000]", "float32[9]")),
    ([torch.ones(1)] * 40, [torch.ones(1)] * 39 + [torch.ones(2)], ("more",)),
)
@pytest.mark.parametrize("seen_before", [False, True])
def test_disagreement_is_raised_on_every_rank(first, second, fragments, seen_before):
    world = World(3)

    def work(rank, post):
        for _ in range(2 if seen_before else 0):
            gather(post, first)
        gather(post, second if rank == 1 else first)

    for error in world.run(work):
        assert isinstance(error, DistributedOperationException), error
        assert "process(es) 1 differ" in str(error) and "operations.gather" in str(error)
        for fragment in fragments:
            assert fragment in str(error)


def test_other_operation_and_other_structure_are_disagreements():
    def operations(rank, post):
        gather(post, [torch.ones(1)], operation="reduce" if rank else "gather")

    def structures(rank, post):
        gather(post, [torch.ones(1)], structure=("mapping", "ab"[rank]))

    ours = torch.zeros(check.HEADER // 8, dtype=torch.int64)
    theirs = torch.full_like(ours, 7_000_000_000)  # of another library
    error = check.differing(torch.stack([ours, theirs]).view(torch.uint8), "gather")
    assert "another collective" in str(error) and "gather" in str(error)
    for error in World(2).run(operations):
        assert "`gather` float32[1]" in str(error) and "`reduce` float32[1]" in str(error)
    for error in World(2).run(structures):
        assert isinstance(error, DistributedOperationException) and "structure" in str(error)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 40, 300, 70000]), st.sampled_from([-1, -1, -1, 0, 1])), min_size=1, max_size=12
    )
)
def test_ranks_stay_in_step_whatever_comes(calls):
    # Each call has a size, and maybe a rank that gets it wrong; all ranks must notice, and go on afterwards.
    def work(rank, post):
        for length, wrong in calls:
            tensor = torch.full((length + (rank == wrong),), float(rank))
            if wrong < 0:
                (result,) = gather(post, [tensor])
                assert result.view(2, length)[:, 0].tolist() == [0.0, 1.0]
            else:
                with pytest.raises(DistributedOperationException):
                    gather(post, [tensor])

    assert World(2).run(work) == [None, None]


def test_disagreement_of_an_exchange_that_was_not_waited_for():
    post = Post(2, None)
    letter = post.letter("gather", None, [torch.ones(2)], GATHER_INLINE)
    other = post.letter("gather", None, [torch.ones(3)], GATHER_INLINE)

    class Event:
        def synchronize(self):
            pass

    post._last = "after"
    post._unread = Event(), torch.stack([letter.header, other.header]), letter, "before"
    with pytest.raises(DistributedOperationException, match=r"float32\[2\]"):
        post.compare_last()
    assert post._last == "before" and post._unread is None
    post._last = "after"
    post._unread = Event(), torch.stack([letter.header] * 2), letter, "before"
    post.compare_last()
    assert post._last == "after"


# -- debug mode


class Told(Communicator):
    """A communicator whose other rank passes something else."""

    world_size = 2

    def __init__(self, other):
        self.other = other

    def gather_object(self, obj):
        return [obj, check_entry(obj[0], self.other)]


def check_entry(operation, data):
    pads = operation.endswith("pad_across_processes")
    return operation, check.describe(data, sizes=not pads), check.describe(data), []


def test_debug_mode_names_ranks_and_shapes():
    with pytest.raises(DistributedOperationException) as caught:
        check.verify(Told({"a": torch.ones(3)}), "accelerate.utils.operations.gather", {"a": torch.ones(2)})
    text = str(caught.value)
    for fragment in ("operations.gather", "Process 0: {'a': float32[2]", "Process 1: {'a': float32[3]"):
        assert fragment in text
    operation = "accelerate.utils.operations.pad_across_processes"
    check.verify(Told([torch.ones(3)]), operation, [torch.ones(2)])  # padding repairs it
    with pytest.raises(DistributedOperationException):
        check.verify(Told([torch.ones(3, 1)]), operation, [torch.ones(2)])
    with pytest.raises(DistributedOperationException, match=r"'cuda'.*process 0: cpu"):
        check.verify(Told(torch.ones(1)), "gather", torch.ones(1), torch.device("cuda"))
