"""Train under whatever launcher started this, with the plugin of its variables: deepspeed_run.py STAGE [notebook]."""

import sys

import torch
from models import inputs_of, mean_square, network

from accelerate import Accelerator, DeepSpeedPlugin, notebook_launcher


def run(stage: int, plugin: bool = False) -> None:
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage) if plugin else None)
    accelerator.deepspeed_plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 2
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = mean_square(model, inputs_of(accelerator.process_index))
    accelerator.backward(loss)
    norms = accelerator.gather(torch.tensor([accelerator.clip_grad_norm_(model.parameters(), 1.0)]))
    found = (type(model).__name__, model.zero_optimization_stage(), accelerator.num_processes)
    assert found == ("DeepSpeedEngine", stage, 2) and norms[0] == norms[1] > 0, (found, norms)
    accelerator.print("trained by an engine")
    accelerator.end_training()


if __name__ == "__main__":
    if "notebook" in sys.argv:
        notebook_launcher(run, (int(sys.argv[1]), True), num_processes=2)
    else:
        run(int(sys.argv[1]))
