"""Arguments that ask for something else than the state they would keep: an error on all ranks, or one warning."""

import importlib.util
import json
import os
import sys
from pathlib import Path

import torch
from shim_tools import WORLD, build, failure, finish, messages, shared, start, train, works
from transformers import TrainingArguments

import transformers_patch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

ZERO = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": "auto"}


def refused(folder, kind, state=None, **changes):
    """Return the message of the error; every rank must have raised it, and the Accelerator must still work."""
    accelerator = start(**(state or {}))
    message = failure(kind, lambda: build(TrainingArguments, folder, **changes))
    raised = accelerator.gather(torch.tensor([1]))
    assert raised.tolist() == [1] * WORLD
    works(accelerator)
    return message


def trained(folder, state=None, **changes):
    """Train; return the precision that was trained in, and whether the state was kept and shared."""
    accelerator = start(**(state or {}))
    arguments = build(TrainingArguments, folder, max_steps=2, **changes)
    kept = shared(accelerator, arguments)
    trainer, losses = train(arguments)
    assert len(losses) == 2 and all(loss == loss for loss in losses), losses
    if kept:
        works(accelerator)
        assert shared(accelerator, arguments, trainer)
    works(trainer.accelerator)
    return [trainer.accelerator.mixed_precision, kept]


def precision(folder):
    """Return the refusals, and what each of the three ways out leads to."""
    bf16 = {"mixed_precision": "bf16"}
    return {
        "bf16": refused(folder, ValueError, bf16=True),
        "fp16": refused(folder, ValueError, fp16=True),
        "no": refused(folder, ValueError, state=bf16),
        "change the arguments": trained(folder, bf16=False),
        "change the arguments to bf16": trained(folder, state=bf16, bf16=True),
        "change the state": trained(folder, state=bf16, bf16=True),
        "reset": trained(folder, bf16=True, preserve_accelerator_state=False),
        "reset to no": trained(folder, state=bf16, preserve_accelerator_state=False),
    }


def launched_precision(folder):
    """The launcher's precision holds for arguments that say nothing, as it does for an Accelerator that says nothing."""
    accelerator = start()
    os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
    refusal = failure(ValueError, lambda: build(TrainingArguments, folder))
    works(accelerator)
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    trainer, _ = train(build(TrainingArguments, folder, max_steps=2))
    return [accelerator.mixed_precision, shared(accelerator, trainer.args, trainer), refusal]


def left_behind(folder):
    """Return what arguments leave in the environment, with the patch and without; transformers 4 leaves the precision."""
    start(mixed_precision="bf16")
    build(TrainingArguments, folder, bf16=True)
    patched = os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    transformers_patch.revert()
    build(TrainingArguments, folder, bf16=True)
    unpatched = os.environ.pop("ACCELERATE_MIXED_PRECISION", None)
    transformers_patch.apply()
    return [patched, unpatched]


def engines(folder):
    """Return what DeepSpeed's configuration, as a dictionary and as a file, and FSDP lead to beside a plain state."""
    path = Path(folder) / f"zero{os.environ.get('RANK', '0')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(ZERO))
    found = {
        "dictionary": refused(folder, RuntimeError, deepspeed=ZERO),
        "file": refused(folder, RuntimeError, deepspeed=str(path)),
        "text": refused(folder, RuntimeError, deepspeed=json.dumps(ZERO)),
        "fsdp": refused(folder, RuntimeError, fsdp="full_shard"),
        "left out": trained(folder, deepspeed=None),
    }
    if importlib.util.find_spec("deepspeed") is None:
        # The third way out leads as far as it does without the patch: to the engine that is missing.
        start()
        resets = {"preserve_accelerator_state": False}
        found["reset"] = failure(Exception, lambda: build(TrainingArguments, folder, deepspeed=ZERO, **resets))
        transformers_patch.revert()
        found["unpatched"] = failure(Exception, lambda: build(TrainingArguments, folder, deepspeed=ZERO))
        transformers_patch.apply()
    return found


def group(folder):
    """Return how often each disagreement with the live group warns, for three arguments in a row."""
    found = {}
    for name, changes in {
        "timeout": {"ddp_timeout": 77},
        "backend": {"ddp_backend": "nccl"},
        "neither": {"ddp_backend": "gloo" if WORLD > 1 else None},
    }.items():
        accelerator = start()
        with messages() as texts:
            for _ in range(3):
                build(TrainingArguments, folder, **changes)
        found[name] = [accelerator.gather(torch.tensor([len(texts)])).tolist(), *texts]
    return found


def main():
    folder = sys.argv[1]
    transformers_patch.apply()
    finish(
        precision=precision(folder),
        launched=launched_precision(folder),
        left=left_behind(folder),
        engines=engines(folder),
        group=group(folder),
    )


if __name__ == "__main__":
    main()
