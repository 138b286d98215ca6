"""A live Accelerator survives a reset of the shared state, and a later state adopts the live process group."""

import torch

from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    world, rank = accelerator.num_processes, accelerator.process_index
    model, optimizer = accelerator.prepare((net := torch.nn.Linear(2, 1)), torch.optim.SGD(net.parameters(), lr=0.1))
    before = dict(accelerator.state.__dict__)

    AcceleratorState._reset_state(reset_partial_state=True)
    assert AcceleratorState._shared_state == {} and PartialState._shared_state == {}
    assert accelerator.state.__dict__ == before
    assert accelerator.num_processes == world and accelerator.distributed_type == before["distributed_type"]

    adopted = PartialState(cpu=accelerator.device.type == "cpu")
    assert (adopted.num_processes, adopted.process_index) == (world, rank)
    assert adopted.distributed_type == accelerator.distributed_type, (
        adopted.distributed_type,
        accelerator.distributed_type,
    )
    assert adopted.__dict__ is not accelerator.state.__dict__

    gathered = accelerator.gather(torch.tensor([rank], device=accelerator.device))
    assert gathered.tolist() == list(range(world))
    accelerator.wait_for_everyone()
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.ones(1, 2, device=accelerator.device)).sum())
        optimizer.step()

    later = Accelerator(cpu=accelerator.device.type == "cpu", mixed_precision="bf16")
    assert later.mixed_precision == "bf16" and accelerator.mixed_precision == "no"
    assert later.num_processes == world
    assert later.gather(torch.tensor([rank], device=later.device)).tolist() == list(range(world))
    accelerator.print("ok reset")


if __name__ == "__main__":
    main()
