"""Two processes on one GPU: gloo, asked for by name, shares the device. `BACKEND` names another one."""

import os

import torch

from accelerate import Accelerator, InitProcessGroupKwargs


def main():
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend=os.environ.get("BACKEND", "gloo"))])
    assert accelerator.device == torch.device("cuda", 0) and accelerator.num_processes == 2
    inner = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(inner, torch.optim.SGD(inner.parameters(), lr=0.1))
    accelerator.backward(model(torch.full((1, 2), accelerator.process_index + 1.0, device=accelerator.device)).sum())
    assert torch.allclose(inner.weight.grad, torch.full_like(inner.weight, 1.5))
    optimizer.step()
    ranks = accelerator.gather(torch.tensor([accelerator.process_index], device=accelerator.device))
    assert ranks.tolist() == [0, 1]
    accelerator.print("ok shared")


if __name__ == "__main__":
    main()
