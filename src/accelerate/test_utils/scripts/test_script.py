"""The self check that `accelerate test` launches: state, data, collectives and training, on however many processes.

Every check raises where something is wrong; the launcher turns that into an exit status.
"""

from collections.abc import Callable

import torch
from torch.utils.data import DataLoader, TensorDataset

from accelerate.accelerator import Accelerator
from accelerate.state import PartialState
from accelerate.test_utils.cases import are_the_same_tensors
from accelerate.test_utils.training import RegressionDataset, RegressionModel
from accelerate.utils.operations import broadcast, gather, gather_object, pad_across_processes, reduce
from accelerate.utils.random import set_seed, synchronize_rng_states

STEPS_LENGTH = 96
BATCH = 8


def check_state(accelerator: Accelerator) -> None:
    """All processes agree on how many they are, and each has its own number."""
    state = PartialState()
    ranks = gather_object([state.process_index])
    assert sorted(ranks) == list(range(state.num_processes)), f"The ranks are {ranks}."
    assert (state.process_index == 0) == state.is_main_process, "The main process is not rank 0."
    with state.split_between_processes(list(range(10 * state.num_processes + 1))) as mine:
        everyone = gather_object(list(mine))
    assert sorted(everyone) == list(range(10 * state.num_processes + 1)), "A split lost or doubled an element."


def check_collectives(accelerator: Accelerator) -> None:
    """Gathering, reducing, broadcasting and padding give what arithmetic says."""
    count, rank = accelerator.num_processes, accelerator.process_index
    mine = torch.full((2,), float(rank), device=accelerator.device)
    expected = torch.arange(count, dtype=torch.float32).repeat_interleave(2).to(accelerator.device)
    assert torch.equal(gather(mine), expected), "gather is wrong."
    assert torch.equal(reduce(mine, "sum"), torch.full_like(mine, count * (count - 1) / 2)), "reduce is wrong."
    assert torch.equal(broadcast(mine.clone(), from_process=0), torch.zeros_like(mine)), "broadcast is wrong."
    uneven = torch.ones(rank + 1, device=accelerator.device)
    assert pad_across_processes(uneven).shape[0] == count, "pad_across_processes is wrong."


def check_random_numbers(accelerator: Accelerator) -> None:
    """Generators agree after they are synchronised."""
    set_seed(1 + accelerator.process_index)
    synchronize_rng_states(["torch"])
    assert are_the_same_tensors(torch.rand(4, device="cpu").to(accelerator.device)), "The generators differ."


def check_data(accelerator: Accelerator) -> None:
    """Every sample of a data set reaches exactly one process, in every way of loading."""
    for length in (STEPS_LENGTH, STEPS_LENGTH + 5):
        for shuffle in (False, True):
            data = TensorDataset(torch.arange(length))
            loader = accelerator.prepare(DataLoader(data, batch_size=BATCH, shuffle=shuffle))
            seen = [accelerator.gather_for_metrics(batch[0]).cpu() for batch in loader]
            found = torch.cat(seen).sort().values
            assert torch.equal(found, torch.arange(length)), f"Of {length} samples, {len(found)} arrived ({shuffle=})."
    accelerator.free_memory()


def check_training(accelerator: Accelerator) -> None:
    """Training on all processes ends where training on one process with the whole batch ends."""
    expected = _train_alone(accelerator.num_processes)
    dataset = RegressionDataset(length=STEPS_LENGTH, seed=42)
    model = RegressionModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset, batch_size=BATCH)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(2):
        for batch in loader:
            loss = torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    trained = accelerator.unwrap_model(model)
    tolerance = 1e-5 if accelerator.mixed_precision == "no" else 0.1
    for name in ("a", "b"):
        want, have = getattr(expected, name), getattr(trained, name).cpu()
        assert torch.allclose(want, have, atol=tolerance), f"{name} is {have.item()} instead of {want.item()}."
        assert are_the_same_tensors(getattr(trained, name).detach()), f"{name} differs between processes."
    accelerator.free_memory()


def _train_alone(num_processes: int) -> RegressionModel:
    model = RegressionModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(RegressionDataset(length=STEPS_LENGTH, seed=42), batch_size=BATCH * num_processes)
    for _ in range(2):
        for batch in loader:
            loss = torch.nn.functional.mse_loss(model(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return model


CHECKS: tuple[Callable[[Accelerator], None], ...] = (
    check_state,
    check_collectives,
    check_random_numbers,
    check_data,
    check_training,
)


def main() -> None:
    """Run all checks, and say what is checked."""
    accelerator = Accelerator()
    accelerator.print(f"{accelerator.num_processes} process(es), device {accelerator.device}:")
    for check in CHECKS:
        accelerator.print(f"- {check.__doc__}", flush=True)
        check(accelerator)
        accelerator.wait_for_everyone()
    accelerator.print("All checks passed.")
    accelerator.end_training()


if __name__ == "__main__":
    main()
