"""The arithmetic, by hand for small models and against what torch really allocates."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from accelerate.commands.model_memory import of_model, training


@pytest.fixture
def blocks():
    """1000 numbers outside of blocks, and blocks of 300, 200 and 100: 1600 in all."""
    layers = nn.ModuleList(nn.Linear(10, rows, bias=False) for rows in (30, 20, 10))
    return of_model(nn.ModuleDict({"embed": nn.Linear(10, 100, bias=False), "layers": layers}), "a test")


# Weights, gradients, optimizer, working, for the 1600 numbers on 4 ranks.
@pytest.mark.parametrize(
    ("strategy", "dtype", "expected"),
    [
        ("ddp", "float32", (6400, 6400, 12800, 6400)),
        ("ddp", "float16", (6400, 6400, 12800, 6400 + 3200)),
        # 25 + 8 + 5 + 3 rows of 10; the root, the two largest blocks, and the gradients of the root.
        ("fsdp", "float32", (4 * 410, 4 * 410, 8 * 410, 4 * (1000 + 300 + 200 + 1000))),
        ("fsdp", "bfloat16", (4 * 410, 4 * 410, 8 * 410, 2 * (1000 + 300 + 200 + 1000))),
        ("shard_grad_op", "float16", (4 * 410, 4 * 410, 8 * 410, 2 * (1600 + 1000))),
        ("zero1", "float16", (3200, 3200, 12 * 400, 3200)),
        ("zero1", "float32", (6400, 6400, 12 * 400, 6400)),
        ("zero2", "float16", (3200, 800, 12 * 400, 3200)),
        ("zero3", "float16", (800, 800, 12 * 400, 2 * 2 * 1000)),
    ],
)
def test_ranks(blocks, strategy, dtype, expected):
    needs = training(blocks, dtype, strategy, 4)
    assert sizes(needs) == expected
    assert needs["total"] == sum(expected)


def sizes(needs):
    return tuple(needs[part] for part in ("weights", "gradients", "optimizer", "working"))


def test_one_process(blocks):
    for words, bytes_of_a_number in ((("float32",), 16), (("float16",), 18), (("float16", "zero2", 1), 16)):
        assert training(blocks, *words)["total"] == bytes_of_a_number * 1600, "no other rank, no bucket"


def test_odd_shapes():
    """FSDP pads what it cannot cut: the first rank keeps a whole row. DeepSpeed's buckets have a limit."""
    small = nn.ParameterDict({"weight": torch.zeros(2, 10), "scale": torch.zeros(())})
    assert training(of_model(small, "a test"), "float32", "fsdp", 8)["weights"] == 4 * (10 + 1)
    large = nn.ParameterDict({"weight": torch.zeros(10**9, device="meta")})
    assert training(of_model(large, "a test"), "float16", "zero2", 2)["working"] == 2 * 500_000_000


# -- against what torch allocates --------------------------------------------------------------------------------------


@pytest.fixture
def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 1001}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config)


def step(model):
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(10)[None]
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    return optimizer


def allocated(model, optimizer):
    """Bytes of a rank's weights with buffers, of its gradients, and of Adam's moments; each once."""

    def size(tensors):
        local = [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in local}.values())

    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    gradients = [parameter.grad for parameter in model.parameters()]
    return size([*model.parameters(), *model.buffers()]), size(gradients), size(moments)


def test_a_real_step(llama):
    needs = training(of_model(llama, "a test"), "float32")
    assert allocated(llama, step(llama)) == sizes(needs)[:3]
    assert needs["working"] == 0


@pytest.fixture
def group_of():
    """A process group whose other ranks are not there: what a rank keeps does not depend on them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def make(size):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        return dist.init_device_mesh("cpu", (size,))

    yield make
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_real_step_of_shards(llama, group_of, ranks):
    from torch.distributed.fsdp import fully_shard

    needs = training(of_model(llama, "a test"), "float32", "fsdp", ranks)
    mesh = group_of(ranks)
    for layer in llama.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(llama, mesh=mesh)
    assert allocated(llama, step(llama)) == sizes(needs)[:3]
