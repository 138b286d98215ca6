"""What a step takes on a GPU: as said, next to what the allocator of an H200 counted in runs of `benchmarks/estimates.py`."""

import pytest
import torch
from torch.nn import functional

from accelerate.extensions.plan.activations import measure
from accelerate.extensions.plan.gpu_kernels import as_on_gpus
from accelerate.extensions.reports.device_specs import device_spec
from accelerate.extensions.reports.estimator import Layout, memory
from cases import cases

BATCH, SEQUENCE = 4, 512


def llama(transformers):
    sizes = {"hidden_size": 1024, "num_hidden_layers": 5, "intermediate_size": 2752, "vocab_size": 1000}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": SEQUENCE}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


def gpt2(transformers):
    sizes = {"n_embd": 1024, "n_layer": 5, "n_head": 16, "vocab_size": 1000, "n_positions": SEQUENCE}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def tokens(batch, sequence):
    some = torch.zeros(batch, sequence, dtype=torch.long)
    return {"input_ids": some, "labels": some.clone()}


@cases(
    "model, sizes, precision, again, measured_mib",
    (llama, {}, "no", False, 2031.5),  # fewer heads of keys: no fused kernel in float32
    (llama, {}, "bf16", True, 1219.4),  # the optimizer's step has the peak
    (llama, {"dp_shard": 2, "fsdp": True}, "bf16", False, 933.1),
    (gpt2, {}, "bf16", False, 1901.6),  # dropout, and a power that autocast computes in float32
    (gpt2, {"dp_shard": 2, "fsdp": True}, "no", True, 985.8),
)
def test_peaks_are_those_that_an_h200_had(model, sizes, precision, again, measured_mib):
    transformers = pytest.importorskip("transformers", minversion="5.0")  # models of before compute otherwise

    def build():
        with torch.device("meta"):
            return model(transformers)

    layout = Layout(**sizes, micro_batch=BATCH, precision=precision, checkpointing=again)
    profile = measure(build, tokens, layout, SEQUENCE, gpu=True)
    said = memory(profile, layout, device_spec("h200-141gb")).total / 2**20
    assert said == pytest.approx(measured_mib, rel=0.05)


def test_functions_are_as_before_after_it():
    before = (functional.scaled_dot_product_attention, functional.dropout, functional.layer_norm, torch.Tensor.__pow__)
    with pytest.raises(KeyError), as_on_gpus():
        assert functional.dropout is not before[1]
        raise KeyError
    attention = functional.scaled_dot_product_attention
    assert before == (attention, functional.dropout, functional.layer_norm, torch.Tensor.__pow__)
