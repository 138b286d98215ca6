"""Memory as `accelerate.extensions.reports.estimator` predicts it, and as torch's allocator counts it in real steps on CPUs.

    python benchmarks/estimates.py [--models llama bert] [--layouts one ddp] [--json] [--write]

Each row is a model, a layout, a precision, with checkpointing or without. A real run takes four steps with AdamW; torch's profiler sees
each allocation and release on rank 0, and the most bytes of the last two steps, in the one that has less, are the measured peak. DDP
runs under gloo. What its threads release, the profiler does not see, so that now and then a buffer seems to stay: of three takes the
least counts. The others run as rank 0 of several on torch's fake process group, which sends nothing: all memory is as in a run with
the other ranks. DeepSpeed takes a bucket of 500,000 numbers, for its own of half a billion would be all that there is to see. With
`BENCHMARK_DEVICE=cuda` models are eight times as wide, the allocator of the GPU counts, and DDP and DeepSpeed are omitted. Needs
transformers and diffusers, and for DeepSpeed the environment of `make test-deepspeed`. `--write` keeps rows that were measured before.
"""

import argparse
import contextlib
import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs/guides/plan.md", ROOT / "benchmarks/results/estimates.json"
BEGIN, END = "<!-- written by benchmarks/estimates.py -->", "<!-- end -->"
KEYS = ("model", "layout", "precision", "checkpointing")
MODELS = ("llama", "gpt2", "mixtral", "bert", "vit", "unet")
CPU = os.environ.get("BENCHMARK_DEVICE", "cpu") == "cpu"
BATCH, SEQUENCE, WIDTH, HEADS = (2, 64, 128, 4) if CPU else (4, 512, 1024, 16)


class UNet(nn.Module):
    """One of diffusers, with attention to a text, and its loss."""

    _no_split_modules = ("ResnetBlock2D", "Transformer2DModel")

    def __init__(self) -> None:
        from diffusers import UNet2DConditionModel

        super().__init__()
        kinds = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
        sizes = {"cross_attention_dim": WIDTH, "attention_head_dim": 8, "norm_num_groups": 8, "layers_per_block": 1}
        sizes |= {"in_channels": 3, "out_channels": 3, "block_out_channels": (WIDTH // 4, WIDTH // 2)}
        self.net = UNet2DConditionModel(down_block_types=kinds[0], up_block_types=kinds[1], **sizes)
        self.gradient_checkpointing_enable = self.net.enable_gradient_checkpointing

    def forward(self, sample: torch.Tensor, text: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.net(sample, 0, text).sample, sample)}


def build(name: str) -> nn.Module:
    """Return a small model; the size of its blocks, embeddings and activations is of one order."""
    import transformers as t

    common = {
        "hidden_size": WIDTH,
        "num_hidden_layers": 5,
        "num_attention_heads": HEADS,
        "intermediate_size": 43 * WIDTH // 16,
    }
    llama = {**common, "vocab_size": 1000, "num_key_value_heads": HEADS // 2, "max_position_embeddings": SEQUENCE}
    if name == "llama":
        return t.LlamaForCausalLM(t.LlamaConfig(**llama))
    if name == "mixtral":
        return t.MixtralForCausalLM(t.MixtralConfig(**llama, num_local_experts=4))
    if name == "gpt2":
        return t.GPT2LMHeadModel(
            t.GPT2Config(
                n_embd=WIDTH,
                n_layer=5,
                n_head=HEADS,
                vocab_size=1000,
                n_positions=max(256, SEQUENCE),
                bos_token_id=0,
                eos_token_id=0,
            )
        )
    if name == "bert":
        return t.BertForMaskedLM(t.BertConfig(**common, vocab_size=1000, max_position_embeddings=512))
    if name == "vit":
        return t.ViTForImageClassification(t.ViTConfig(**common, image_size=64, patch_size=8))
    return UNet()


def inputs(name: str, batch: int, sequence: int) -> dict[str, torch.Tensor]:
    """Return the arguments of a forward."""
    if name == "unet":
        return {"sample": torch.zeros(batch, 3, 32, 32), "text": torch.zeros(batch, 16, WIDTH)}
    if name == "vit":
        return {"pixel_values": torch.zeros(batch, 3, 64, 64), "labels": torch.zeros(batch, dtype=torch.long)}
    tokens = torch.randint(0, 1000, (batch, sequence))  # so that experts get about as many each
    return {"input_ids": tokens, "labels": tokens.clone()}


LAYOUTS = {
    "one": (1, {}),
    "ddp": (2, {"dp_replicate": 2}),
    "fsdp2": (2, {"dp_shard": 2}),
    "hsdp": (4, {"dp_replicate": 2, "dp_shard": 2}),
    "tp": (2, {"tp": 2}),
    "cp": (2, {"cp": 2}),
    "sp": (2, {"sp": 2, "fsdp": True}),
    "ep": (2, {"dp_shard": 2, "ep": 2}),
    "zero2": (2, {"dp_replicate": 2, "zero": 2, "bucket": 500_000}),
}
# Those that only some models can take.
ONLY = {"tp": ("llama",), "cp": ("llama",), "sp": ("llama", "gpt2"), "ep": ("mixtral",), "hsdp": ("llama", "gpt2")}
ONLY["zero2"] = ("llama", "gpt2", "bert", "vit")
# DeepSpeed has a separate environment, which `make test-deepspeed` makes.
DEEPSPEED = ROOT / ".venv-deepspeed/bin/python"


def cases(models: list[str], layouts: list[str]) -> list[dict]:
    """Return the rows that the arguments ask for."""
    rows = []
    for model, layout, precision, again in itertools.product(models, layouts, ("no", "bf16"), (False, True)):
        if model in ONLY.get(layout, MODELS):
            rows.append({"model": model, "layout": layout, "precision": precision, "checkpointing": again})
    return rows


def predict(case: dict) -> int:
    """Return the predicted peak of a row."""
    from accelerate.extensions.plan.activations import measure
    from accelerate.extensions.reports.device_specs import device_spec
    from accelerate.extensions.reports.estimator import Layout, memory

    def on_meta() -> nn.Module:
        with torch.device("meta"):
            return build(case["model"])

    sizes = LAYOUTS[case["layout"]][1]
    layout = Layout(**sizes, micro_batch=BATCH, precision=case["precision"], checkpointing=case["checkpointing"])
    profile = measure(
        on_meta, lambda batch, sequence: inputs(case["model"], batch, sequence), layout, SEQUENCE, gpu=not CPU
    )
    return memory(profile, layout, None if CPU else device_spec("h200-141gb"))


def take_steps(case: dict) -> int:
    """Take four steps, and return the most bytes that torch had allocated in the last two, in the one that has less."""
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile, record_function
    from torch.testing._internal.distributed import fake_pg

    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import shift_labels

    ranks = LAYOUTS[case["layout"]][0]
    if ranks > 1 and "RANK" not in os.environ:
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=ranks)
    gc.collect()
    watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True) if CPU else contextlib.nullcontext()
    with watched as found:
        sizes = LAYOUTS[case["layout"]][1]
        options = {}
        if "zero" in sizes:
            plugin = DeepSpeedPlugin(zero_stage=sizes["zero"])
            plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = BATCH
            plugin.deepspeed_config["zero_optimization"]["reduce_bucket_size"] = sizes["bucket"]
            options["deepspeed_plugin"] = plugin
        elif len(sizes) > 1 or not {"dp_replicate", "dp_shard"} & set(sizes):
            axes = {f"{name}_size": size for name, size in sizes.items() if name != "fsdp"}
            axes |= {"sp_backend": "torch"} if "sp" in sizes else {}
            options["parallelism_config"] = ParallelismConfig(**axes)
        if {"dp_shard", "cp", "sp"} & set(sizes):
            options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
            )
        accelerator = Accelerator(cpu=CPU, mixed_precision=case["precision"], **options)
        torch.manual_seed(0)
        model = build(case["model"]).train()
        if case["checkpointing"]:
            model.gradient_checkpointing_enable()
        if hasattr(model, "config"):
            model.config.use_cache = False
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        on_device, shared = [], bool({"cp", "sp"} & set(sizes))
        for number in range(4):
            gc.collect()  # cycles of the step before are no part of this one
            batch = {
                name: value.to(accelerator.device) for name, value in inputs(case["model"], BATCH, SEQUENCE).items()
            }
            if not CPU:
                torch.cuda.reset_peak_memory_stats()
            if shared:
                batch |= {"labels": shift_labels(batch["labels"])}
            cut = accelerator.maybe_context_parallel(
                buffers=[*batch.values()] * shared,
                buffer_seq_dims=[1, 1] * shared,
                no_restore_buffers={*batch.values()} if shared else None,
            )
            with cut, record_function(f"step {number}"):
                output = model(**batch, **({"shift_labels": batch["labels"]} if shared else {}))
                loss = output["loss"]
                del output
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                del loss
            if not CPU:
                on_device.append(torch.cuda.max_memory_allocated())
        accelerator.free_memory()
        del model, optimizer
    AcceleratorState._reset_state(reset_partial_state="RANK" not in os.environ)
    GradientState._reset_state()
    if dist.is_initialized() and "RANK" not in os.environ:
        dist.destroy_process_group()
    if not CPU:
        return min(on_device[2:])
    events = found.profiler.kineto_results.events()
    sizes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    peaks = []
    for number in (2, 3):
        step = next(event for event in events if event.name() == f"step {number}")
        start, end = step.start_ns(), step.start_ns() + step.duration_ns()
        live = most = 0
        for when, size in sizes:
            live += size
            if start <= when <= end:
                most = max(most, live)
        peaks.append(most)
    return min(peaks)


def worker(path: str) -> None:
    """Measure rows on this rank; rank 0 writes the file again."""
    import warnings

    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    with open(path) as file:
        rows = json.load(file)
    for row in rows:
        # What gloo's threads free, the profiler does not see: of three takes one has it all.
        row["measured"] = min(take_steps(row) for _ in range(3 if "RANK" in os.environ else 1))
    if os.environ.get("RANK", "0") == "0":
        with open(path, "w") as file:
            json.dump(rows, file)


def main() -> None:
    """Predict, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument(
        "--write", action="store_true", help="keep the rows in results/, and write the table of the guide"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker)
        return
    rows = cases(args.models, args.layouts)
    done = []
    # DDP needs processes; the others are rank 0 of a group that sends nothing. DeepSpeed keeps groups until its process ends.
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    runs = [([sys.executable], [row for row in rows if row["layout"] not in ("ddp", "zero2")])]
    if CPU:
        runs.append((launch, [row for row in rows if row["layout"] == "ddp"]))
        runs += [([str(DEEPSPEED)], [row]) for row in rows if row["layout"] == "zero2" and DEEPSPEED.exists()]
    for command, some in runs:
        if not some:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "rows.json")
            with open(path, "w") as file:
                json.dump(some, file)
            subprocess.run([*command, os.path.abspath(__file__), "--worker", path], check=True)
            with open(path) as file:
                done += json.load(file)
    for row in done:
        said = predict(row)
        row["predicted"], row["when"] = said.total, said.when
    if args.json:
        print(json.dumps(done, indent=1))
        return
    print(f"{table(done)}\n{summary(done)}")
    if args.write:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
        merged = {tuple(row[name] for name in KEYS): row for row in known + done}
        RESULTS.write_text(json.dumps([merged[key] for key in sorted(merged, key=order)], indent=1) + "\n")
        write_page()


def order(key: tuple) -> tuple:
    """Return the place of a row in the table."""
    model, layout, *rest = key
    return MODELS.index(model), list(LAYOUTS).index(layout), *rest


def table(rows: list[dict]) -> str:
    """Return a Markdown table with a line for each model and layout."""
    lines = {}
    for row in rows:
        error = row["predicted"] / row["measured"] - 1
        cells = lines.setdefault((row["model"], row["layout"]), {})
        cells[row["precision"], row["checkpointing"]] = f"{row['measured'] / 2**20:.2f} ({100 * error:+.1f} %)"
    columns = [("no", False), ("no", True), ("bf16", False), ("bf16", True)]
    text = "| model | layout | fp32 | fp32, recompute | bf16 | bf16, recompute |\n|---|---|---:|---:|---:|---:|\n"
    for names, cells in lines.items():
        text += f"| {' | '.join([*names, *(cells.get(column, '') for column in columns)])} |\n"
    return text


def summary(rows: list[dict]) -> str:
    """Return the errors of all rows in one sentence."""
    errors = [abs(row["predicted"] / row["measured"] - 1) for row in rows]
    return f"Errors: median {100 * statistics.median(errors):.2f} %, worst {100 * max(errors):.1f} %, of {len(errors)} rows."


def write_page() -> None:
    """Write the errors of all stored results into the guide."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n  {summary(json.loads(RESULTS.read_text()))}\n  {END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
