"""transformers' Trainer with its arguments for FSDP and DeepSpeed, on this package and on the peer's: train, save, resume.

`trainer_arguments.py FOLDER CASE ...` trains each case for six steps, with a checkpoint after every second. `CASE=RUN` resumes from the
fourth step of the run in that folder, whatever number of processes has written it. A case is a strategy with words: `fsdp2+sharded+offload`.
"""

import contextlib
import sys
import traceback

import tiny
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

STEPS, GLOBAL_BATCH, ROWS, SAVED_AT = 6, 8, 40, 4
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


def llama():
    set_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=24, num_key_value_heads=2, pad_token_id=0, eos_token_id=4))


def fsdp(version, words):
    kind = "SHARDED_STATE_DICT" if "sharded" in words else "FULL_STATE_DICT"
    config = {"fsdp_version": version, "state_dict_type": kind, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    config |= {"activation_checkpointing": "recompute" in words, **({"use_orig_params": True} if version == 1 else {})}
    return {"fsdp": "full_shard auto_wrap" + " offload" * ("offload" in words), "fsdp_config": config}


def modern(words):
    """The arguments as transformers 5.24 documents them; the classes to wrap are those that the model names."""
    config = {"reshard_after_forward": "unsharded" not in words, "cpu_offload": "offload" in words}
    config |= {"activation_checkpointing": "recompute" in words, "cpu_ram_efficient_loading": "efficient" in words}
    if "sized" in words:
        config |= {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 2000}
    if "whole" in words:
        config["auto_wrap_policy"] = "NO_WRAP"
    if "sharded" in words:
        config["state_dict_type"] = "SHARDED_STATE_DICT"
    return {"fsdp": True, "fsdp_config": config}


def zero(stage, words):
    config = {"stage": stage}
    if stage == 3:
        config |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
    if "offload" in words:
        config["offload_optimizer"] = {"device": "cpu"}
    sections = {
        "zero_optimization": config,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return {"deepspeed": {**dict.fromkeys(AUTO, "auto"), **sections}}


def strategy(words):
    if words[0] == "fsdp":
        return modern(words)
    name, version = words[0][:-1], words[0][-1]
    return {"fsdp": fsdp, "zero": zero}[name](int(version), words) if version.isdigit() else {}


class Rows(torch.utils.data.Dataset):
    """Rows of token ids, and the number of each row."""

    def __init__(self):
        self.ids = torch.randint(5, 24, (ROWS, 10), generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index], "number": torch.tensor(index)}


class RecordingTrainer(tiny.Exact, Trainer):
    """Keeps the loss of each batch, and which rows all ranks read for it."""

    def training_step(self, model, inputs, *rest, **options):
        numbers = tiny.everywhere(inputs.pop("number").tolist())
        self.rows = [*getattr(self, "rows", []), sorted(sum(numbers, []))]
        return super().training_step(model, inputs, *rest, **options)


def train(folder, words, checkpoint):
    accumulation = 2 if "accumulate" in words else 1
    batch = GLOBAL_BATCH // tiny.ranks() // accumulation
    loaders = {"dispatch_batches": "dispatch" in words, "split_batches": "split" in words}
    batch *= tiny.ranks() if "split" in words else 1
    arguments = TrainingArguments(
        folder, accelerator_config=loaders, dataloader_num_workers=2 if "workers" in words else 0, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, max_steps=STEPS, save_steps=2,
        learning_rate=1e-2, adam_epsilon=1e-4, max_grad_norm=0.5, bf16="bf16" in words, seed=3, logging_steps=1, report_to=[],
        use_cpu=True, disable_tqdm=True, remove_unused_columns=False, **strategy(words),
    )  # fmt: skip
    trainer = RecordingTrainer(llama(), arguments, train_dataset=Rows())
    trainer.train(resume_from_checkpoint=checkpoint)
    history = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    return {
        "strategy": trainer.accelerator.distributed_type.value, "rows": trainer.rows, "exact": tiny.everywhere(trainer.losses),
        # A resumed run has those of the steps before in its history.
        "losses": [entry["loss"] for entry in history], "norms": [entry["grad_norm"] for entry in history],
    }  # fmt: skip


def patched(words):
    if "apply" not in words:
        return contextlib.nullcontext()
    import transformers_patch

    return transformers_patch.applied(checkpoints=True)


def main():
    root, *cases = sys.argv[1:]
    reports = {}
    for case, _, run in (words.partition("=") for words in cases):
        words = case.split("+")
        checkpoint = f"{run}/checkpoint-{SAVED_AT}" if run else None
        with tiny.apart(), patched(words):
            try:
                reports[case] = train(f"{root}/{case}", words, checkpoint)
            except Exception as error:
                reports[case] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}
    tiny.report(**reports)


if __name__ == "__main__":
    main()
