"""Train, save and resume with the strategy that the launcher's switch asks for."""

import torch

from accelerate import Accelerator


def main() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.save_state("checkpoint")
    before = accelerator.get_state_dict(model)["weight"].clone()
    accelerator.backward(model(torch.full((4, 2), 1.0 + accelerator.process_index)).sum())
    optimizer.step()
    assert not torch.equal(before, accelerator.get_state_dict(model)["weight"])
    accelerator.load_state("checkpoint")
    assert torch.equal(before, accelerator.get_state_dict(model)["weight"])
    accelerator.print(f"{accelerator._strategy.name} resumed")


if __name__ == "__main__":
    main()
