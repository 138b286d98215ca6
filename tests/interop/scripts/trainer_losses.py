"""transformers' Trainer on several ranks: loss and norm of gradients are those of one process over the same micro-batches.

accelerate launch --cpu --num_processes 2 trainer_losses.py FOLDER [stock] [CASE ...]

Prints by which factor the figures of the first step and of the evaluation differ, and how far the worst of all steps is off: of
transformers as it is installed, for some cases (`stock`: for all and nothing else), and patched.
"""

import gc
import os
import sys
from functools import cache

import torch
import transformers
from sharded_models import LENGTH, WORDS, llama
from tiny import apart, report
from transformers.distributed import DistributedConfig

import transformers_patch
from accelerate import ParallelismConfig
from accelerate.state import PartialState

BATCH, WINDOW, STEPS = 4, 2, 4
EXACT = 1e-6
WEIGHT = 0.5  # of the auxiliary loss: of which one too many cannot be overlooked
SIZES = {"vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "pad_token_id": 0}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 2}
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def qwen(weight):
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8))


def mixtral(weight):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SIZES, **experts, router_aux_loss_coef=weight))


MODELS = {"llama": lambda weight: llama(), "qwen": qwen, "mixtral": mixtral}
LAYERS = ["LlamaDecoderLayer", "Qwen3DecoderLayer", "MixtralDecoderLayer"]


def mesh(sharded=True, **sizes):
    def options(model):
        layer = next(name for name in LAYERS if name.lower().startswith(model))
        wrapped = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": [layer], "cpu_ram_efficient_loading": False}
        fsdp = {"fsdp": "full_shard auto_wrap", "fsdp_config": wrapped} if sharded else {}
        return fsdp | ({"parallelism_config": ParallelismConfig(**sizes)} if sizes else {})

    return options


def arriving(**sizes):
    return lambda model: {"arriving": sizes}


SP = {"sp_size": 2, "sp_backend": "torch"}
# How many different micro-batches are computed at a time, and what the run is told.
LAYOUTS = {
    "ddp": (2, lambda model: {}), "fsdp": (2, mesh()), "tp": (1, mesh(False, tp_size=2)), "cp": (1, mesh(cp_size=2)),
    "sp": (1, mesh(False, **SP)), "sp-fsdp": (1, mesh(**SP)), "ep": (2, mesh(dp_shard_size=2, ep_size=2)),
    "arrived-tp": (1, arriving(tp_size=2)), "arrived-ep": (2, arriving(fsdp_size=2, ep_size=2)),
    # on four processes
    "fsdp-tp": (2, mesh(dp_shard_size=2, tp_size=2)), "fsdp-cp": (2, mesh(dp_shard_size=2, cp_size=2)),
    "fsdp-sp": (2, mesh(dp_shard_size=2, **SP)), "ddp-sp": (2, mesh(False, dp_replicate_size=2, **SP)),
    "arrived-fsdp-tp": (2, arriving(fsdp_size=2, tp_size=2)),
    "arrived-ep-fsdp-tp": (2, arriving(fsdp_size=2, tp_size=2, ep_size=2)),
}  # fmt: skip
LOCAL, SMOOTH = {"average_tokens_across_devices": False}, {"label_smoothing_factor": 0.1}
PADDED = {"padded": True}
# The model, the layout, and arguments of both runs.
CASES = {
    **{f"llama {name}": ("llama", name, {}) for name in LAYOUTS if "ep" not in name.split("-")},
    **{f"qwen {name}": ("qwen", name, {}) for name in ("arrived-tp", "arrived-fsdp-tp")},
    **{f"mixtral {name}": ("mixtral", name, {}) for name in LAYOUTS if name not in ("tp", "fsdp-tp")},
    **{f"llama {name}, counted alone": ("llama", name, LOCAL) for name in ("tp", "cp", "sp", "arrived-tp")},
    **{f"llama {name}, smoothed": ("llama", name, SMOOTH) for name in ("fsdp", "tp", "cp", "sp-fsdp")},
    # Ranks have different numbers of tokens for the router, too.
    **{f"mixtral {name}, padded": ("mixtral", name, PADDED) for name in ("cp", "sp")},
}
# What the installed release does not do.
STOCK = ["llama sp", "llama tp, counted alone", "llama fsdp, smoothed", "llama cp, smoothed"]
STOCK += ["qwen arrived-tp", "mixtral ddp"]
QUICK = [name for name in CASES if "fsdp-" not in name and "ddp-" not in name]


class Rows(torch.utils.data.Dataset):
    """Rows of which each has another number of tokens that count."""

    def __init__(self, count, seed, padded=False):
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(3, WORDS, (count, LENGTH), generator=generator)
        ends = torch.randint(3, LENGTH + 1, (count, 1), generator=generator)
        self.mask = torch.arange(LENGTH) < ends
        self.labels = self.ids.masked_fill(~self.mask, -100)
        self.padded = padded

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        mask = {"attention_mask": self.mask[index].long()} if self.padded else {}
        return {"input_ids": self.ids[index], "labels": self.labels[index], **mask}


def built(folder, name, weight, arriving=None):
    transformers.set_seed(5)
    if arriving is None:
        return MODELS[name](weight)
    place = f"{folder}/{name}"
    with PartialState(cpu=True).main_process_first():
        if PartialState().is_main_process:
            MODELS[name](weight).save_pretrained(place)
    return transformers.AutoModelForCausalLM.from_pretrained(
        place, distributed_config=DistributedConfig(**arriving)
    ).train()


def run(folder, name, batch, window, weight=WEIGHT, arriving=None, padded=False, **options):
    common = {"per_device_train_batch_size": batch, "per_device_eval_batch_size": batch, "num_train_epochs": 1}
    common |= {"gradient_accumulation_steps": window, "learning_rate": 1e-2, "adam_epsilon": 1e-4, "seed": 3}
    common |= {"logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(folder, **common | options)
    rows = {"train_dataset": Rows(BATCH * WINDOW * STEPS, 3, padded), "eval_dataset": Rows(2 * BATCH, 4, padded)}
    trainer = transformers.Trainer(built(folder, name, weight, arriving), arguments, **rows)
    trainer.train()
    if trainer.state.max_steps != STEPS:
        print(f"{trainer.state.max_steps} steps are planned for {trainer.state.global_step}", file=sys.stderr)
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    evaluation = trainer.evaluate()["eval_loss"]
    return [step["loss"] for step in steps], [step["grad_norm"] for step in steps], evaluation


@cache
def alone(folder, name, replicas, options):
    """Figures of the Trainer as it is installed, on one process, which takes the micro-batches one after the other.

    It adds the auxiliary loss in full for each of them: its weight is divided by their number.
    """
    parts = replicas * WINDOW
    batch, window = (BATCH // replicas, parts) if name == "mixtral" else (BATCH, WINDOW)
    variables = {key: os.environ.pop(key) for key in LAUNCHED if key in os.environ}
    try:
        with apart():
            return run(folder, name, batch, window, WEIGHT / parts, **dict(options))
    finally:
        os.environ.update(variables)


def compared(found, expected, evaluates):
    (losses, norms, evaluation), (other_losses, other_norms, other_evaluation) = found, expected
    mine, theirs = [*losses, *norms], [*other_losses, *other_norms]
    if evaluates:
        mine, theirs = [*mine, evaluation], [*theirs, other_evaluation]
    assert len(losses) == len(other_losses), (losses, other_losses)
    worst = max(abs(a / b - 1) for a, b in zip(mine, theirs, strict=True))
    factors = [losses[0] / other_losses[0], norms[0] / other_norms[0], evaluation / other_evaluation]
    return [*(round(factor, 5) for factor in factors), float(f"{worst:.1e}")]


def table_of(folder, cases, expected):
    table = {}
    for case in cases:
        name, layout, options = CASES[case]
        replicas, sharing = LAYOUTS[layout]
        with apart():
            found = run(folder, name, BATCH // replicas, WINDOW, **sharing(name), **options)
        # One process evaluates the auxiliary loss with the weight of a micro-batch.
        table[case] = compared(found, expected[case], evaluates=name != "mixtral")
    return table


def main():
    folder, *words = sys.argv[1:]
    named = [word for word in words if word != "stock"]
    chosen = named or QUICK
    gc.freeze()  # collections are many, and pass over what imports have left
    # Before there is a process group.
    expected = {}
    for case in chosen:
        name, layout, options = CASES[case]
        expected[case] = alone(folder, name, LAYOUTS[layout][0], tuple(options.items()))
    stock = table_of(folder, chosen if "stock" in words else [case for case in STOCK if not named], expected)
    table = {}
    if "stock" not in words:
        transformers_patch.apply(losses=True)
        table = table_of(folder, chosen, expected)
    for case, (*_, worst) in table.items():
        assert worst <= EXACT, (case, table[case], expected[case])
    report(passed=len(table), table=table, stock=stock)


if __name__ == "__main__":
    main()
