"""A step of a small Llama by Megatron core on two ranks: through the Accelerator, and by core's own classes manually. megatron_core.py [ROUNDS]

Both are in one process, and take turns. Without GPUs what core asks of "cuda" is done by the host, as in the tests.
"""

import json
import os
import statistics
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import torch

if not torch.cuda.is_available():
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "distributed" / "scripts"))
    import cuda_on_cpu  # noqa: F401  before core, which asks for its device when it is imported

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate import Accelerator
from accelerate.utils import MegatronLMPlugin

warnings.simplefilter("ignore")
ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 12
WIDTH, HIDDEN, LAYERS, HEADS, WORDS, LENGTH, MICRO, COUNT = 256, 688, 4, 8, 4096, 128, 2, 2
RATE, DECAY, CLIP, STEPS = 1e-4, 0.01, 1.0, 5


def rows():
    ids = torch.randint(0, WORDS, (MICRO * COUNT, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": one, "labels": one} for one in ids]


def ours():
    """Return a step by the Accelerator."""
    plugin = MegatronLMPlugin(tp_degree=2, num_micro_batches=COUNT, gradient_clipping=CLIP)
    accelerator = Accelerator(megatron_lm_plugin=plugin)
    sizes = {"hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": WORDS}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=HEADS, tie_word_embeddings=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=DECAY)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows(), batch_size=MICRO))
    model.train()
    (batch,) = loader

    def step():
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()

    return step, sum(parameter.numel() for parameter in model.core.parameters())


def by_hand():
    """Return a step of the same model by core's classes, which has its groups of ranks already."""
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        ffn_hidden_size=HIDDEN,
        tensor_model_parallel_size=2,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        pipeline_dtype=torch.float32,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=WORDS,
        max_sequence_length=2048,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    model = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=RATE, weight_decay=DECAY, clip_grad=CLIP, params_dtype=torch.float32), [model]
    )
    config.finalize_model_grads_func, config.no_sync_func = finalize_model_grads, model.no_sync
    batches = torch.utils.data.default_collate(rows())["input_ids"].chunk(COUNT)
    places = torch.arange(LENGTH).expand(MICRO, -1)

    def loss_of(losses):
        mean = losses[:, :-1].mean()
        return mean, {"loss": mean.detach()}

    def forward(batches, model):
        ids = next(batches)
        labels = torch.nn.functional.pad(ids[:, 1:], (0, 1))
        return model(ids, places, None, labels=labels), partial(loss_of)

    run = get_forward_backward_func()

    def step():
        model.zero_grad_buffer()
        optimizer.zero_grad()
        found = run(
            forward_step_func=forward,
            data_iterator=iter(batches),
            model=[model],
            num_microbatches=COUNT,
            seq_length=LENGTH,
            micro_batch_size=MICRO,
            forward_only=False,
        )
        optimizer.step()
        return torch.stack([one["loss"] for one in found]).mean()

    return step, count


def main():
    (accelerated, mine), (plain, theirs) = ours(), by_hand()
    assert mine == theirs, (mine, theirs)
    times = {"ours": [], "manually": []}
    for number in range(-1, ROUNDS):
        for name, step in [("ours", accelerated), ("manually", plain)][:: 1 if number % 2 else -1]:
            begun = time.perf_counter()
            for _ in range(STEPS):
                step()
            if number >= 0:
                times[name].append((time.perf_counter() - begun) / STEPS * 1000)
    medians = {name: statistics.median(values) for name, values in times.items()}
    figures = {
        "step by Megatron core (ms)": medians["ours"],
        "the same / Megatron core's classes": medians["ours"] / medians["manually"],
    }
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
