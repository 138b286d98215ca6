"""Sizes of models: the arithmetic manually and against what torch allocates, and the command. The Hub is never asked."""

import json
import re
import sys
import types

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from accelerate.commands import estimate as public
from accelerate.extensions.plan import estimate
from accelerate.extensions.plan.estimate import inventory_of_model, training
from accelerate.launch.errors import LaunchError
from cases import cases
from sharded_samples import net

SIZES = {"vocab_size": 100, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"hidden_size": 16, "intermediate_size": 32}
LLAMA = {"model_type": "llama", **SIZES, "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"]}


@pytest.fixture
def model(monkeypatch):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    monkeypatch.setattr(estimate, "create_empty_model", lambda *args: model)
    return model


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setattr(public, "verify_on_hub", lambda repo, token=None: pytest.fail("the Hub was asked"))


def answer(accelerate, *words):
    status, out, err = accelerate("estimate-memory", *map(str, words), "--json")
    assert status == 0, err
    return json.loads(out)


def test_command_prints_two_tables(accelerate, model):
    status, out, _ = accelerate("estimate-memory", "some-model", "--dtypes", "float32", "float16", "int8")
    assert status == 0
    assert "Memory Usage for loading `some-model`" in out and "Training with Adam, one process" in out
    lines = [re.split(" {2,}", line.strip()) for line in out.splitlines()]
    for line in (
        ["dtype", "Largest Layer", "Total Size", "Inference", "Training using Adam"],
        ["float32", "64 bytes", "96 bytes", "116 bytes", "384 bytes"],
        ["float16", "32 bytes", "48 bytes", "58 bytes", "432 bytes"],
        ["int8", "16 bytes", "24 bytes", "29 bytes", "N/A"],
        ["ddp", "float16", "96 bytes", "96 bytes", "192 bytes", "48 bytes", "432 bytes"],
    ):
        assert line in lines


def test_ranks_and_strategies(accelerate, refused, model):
    report = answer(accelerate, "some-model", "--num_processes", 2, "--dtypes", "float32")
    rows = [(one["strategy"], one["processes"]) for one in report["training"]]
    assert rows == [(name, 2) for name in ("ddp", "fsdp", "shard_grad_op", "zero1", "zero2", "zero3")]
    words = ("some-model", "--num_processes", "2", "--strategy", "zero3", "--dtypes", "float16", "int4")
    (only,) = answer(accelerate, *words)["training"]
    assert (only["strategy"], only["dtype"]) == ("zero3", "float16"), "int4 cannot be trained in"
    assert "each of 2 processes" in accelerate("estimate-memory", *words)[1]
    assert "--num_processes is 0" in refused("estimate-memory", "some-model", "--num_processes", 0)


def test_data_is_as_recorded(model):
    """The shape that callers of `gather_data` know: whole numbers for fp32, and the four parts of training."""
    args = estimate.estimate_command_parser().parse_args(["some-model"])
    del args.num_processes, args.strategy, args.json
    rows = estimate.gather_data(args)
    sizes = [(64, 96), (32.0, 48.0), (16.0, 24.0), (8.0, 12.0)]
    assert [tuple(row[1:3]) for row in rows] == sizes and [row[0] for row in rows] == args.dtypes
    assert isinstance(rows[0][1], int)
    assert rows[0][3] == {"model": 96, "optimizer": 192, "gradients": 96, "step": 384}
    estimate.estimate_command(args)


def test_which_library_refuses_a_model():
    assert estimate.check_has_model(RuntimeError("Unknown model (x)")) == "timm"
    assert estimate.check_has_model(ValueError("x model type y")) == "transformers"
    assert estimate.check_has_model(RuntimeError("x model type y")) == "unknown"


def test_index_of_weights(accelerate, refused, place, no_hub):
    index = place / "m" / "model.safetensors.index.json"
    index.parent.mkdir()
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    for name, file in names.items():
        save_file({name: torch.zeros(3)}, place / "m" / file)
    save_file({"z": torch.zeros(9)}, place / "m" / "consolidated.safetensors")
    for name in (index, place / "m"):
        assert answer(accelerate, name)["sizes"][0]["total_size"] == 24, "what libraries load counts"
    (place / "m" / names["b"]).unlink()
    assert f"{names['b']}': No such file" in refused("estimate-memory", index)
    index.write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    assert "is no index of shards" in refused("estimate-memory", index)
    index.unlink()
    said = refused("estimate-memory", place / "m")
    assert f"several files of weights: consolidated.safetensors, {names['a']}. Name one" in said


def test_sharded_checkpoint(accelerate, place, no_hub):
    import sharded_io

    sharded_io.save_model(nn.Linear(8, 4), place / "c", layout="sharded")
    for name in ("c", "c/pytorch_model_fsdp_0"):
        report = answer(accelerate, name)
        assert report["parameters"] == 36
        assert report["sizes"][0]["total_size"] == 144


def test_packed_and_damaged_weights(refused, place):
    packed = {"l.qweight": torch.zeros(64, 8, dtype=torch.int32), "l.scales": torch.zeros(8, dtype=torch.float16)}
    save_file(packed, place / "gptq.safetensors")
    error = refused("estimate-memory", "gptq.safetensors")
    assert "packed into integers (2,064 bytes)" in error and "--library_name transformers" in error
    save_file({"a": torch.zeros(3)}, place / "x.safetensors")
    (place / "x.safetensors").write_bytes((place / "x.safetensors").read_bytes()[:-1])
    assert "'x.safetensors' is damaged" in refused("estimate-memory", "x.safetensors")


def test_places_without_a_model(refused, place, no_hub):
    (place / "folder").mkdir()
    assert "'folder' has no model: " in refused("estimate-memory", "folder")
    for name, content, message in (
        ("x.bin", "", "without loading it"),
        ("config.json", "{", "is no JSON"),
        ("config.json", "[1]", "neither model_type"),
        ("folder/pytorch_model.bin", "", "neither a .safetensors file nor a config.json, but pytorch_model.bin"),
    ):
        (place / name).write_text(content)
        assert message in refused("estimate-memory", name.partition("/")[0])
    for name in ("", "./nothing", "a/b/c", "x y", "~/none/of/it"):
        assert "There is no file or folder" in refused("estimate-memory", name)


@pytest.fixture
def config(place):
    pytest.importorskip("transformers")
    (place / "llama").mkdir()

    def write(**changed):
        (place / "llama" / "config.json").write_text(json.dumps({**LLAMA, **changed}))
        return place / "llama"

    write()
    return write


# Manually: a layer has four 16 x 16, three 16 x 32, and two norms; then the last norm, and a table of 100 x 16.
BARE = 3 * (4 * 16 * 16 + 3 * 16 * 32 + 2 * 16) + 16 + 100 * 16


def test_local_configuration(accelerate, place, config, no_hub):
    for name in ("llama", "llama/config.json"):
        report = answer(accelerate, name)
        assert report["parameters"] == BARE + 100 * 16
        assert "LlamaForCausalLM" in report["source"]
        buffers = report["sizes"][0]["total_size"] - 4 * report["parameters"]
        assert 0 < buffers < 200, "frequencies of the rotary embedding"


@pytest.mark.parametrize("changed", [{"dtype": "bfloat16", "architectures": None}, {"architectures": ["NoSuchModel"]}])
def test_configuration_without_architecture(accelerate, config, changed):
    config(**changed)
    report = answer(accelerate, "llama")
    assert (report["parameters"], report["sizes"][0]["largest_layer"]) == (BARE, 4 * (4 * 256 + 3 * 512 + 32))


def test_what_cannot_be_built_and_code_of_others_which_does_not_run(refused, place, config):
    for changed in ({"model_type": "no_such_type"}, {"hidden_size": -1}):
        config(**changed)
        assert "'llama'" in refused("estimate-memory", "llama")
    folder = config(auto_map={"AutoConfig": "own.Config", "AutoModel": "own.Model"}, model_type="own")
    (folder / "own.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    refused("estimate-memory", "llama")
    assert not (place / "ran").exists()


def test_weights_come_before_the_configuration(accelerate, config, no_hub):
    save_file({"a.weight": torch.zeros(3, 5)}, config() / "model.safetensors")
    assert answer(accelerate, "llama")["parameters"] == 15
    assert answer(accelerate, "llama", "--library_name", "transformers")["parameters"] > 15


def test_timm(accelerate, place, monkeypatch, no_hub):
    asked = []

    def create_model(name, pretrained, **options):
        asked.append((name, options))
        return nn.Linear(3, 2)

    monkeypatch.setitem(sys.modules, "timm", types.SimpleNamespace(create_model=create_model))
    (place / "config.json").write_text('{"architecture": "resnet18", "num_classes": 7}')
    assert answer(accelerate, ".")["parameters"] == 8
    assert answer(accelerate, "resnet50", "--library_name", "timm")["parameters"] == 8
    monkeypatch.setattr(public, "verify_on_hub", lambda *args: types.SimpleNamespace(library_name="timm"))
    assert answer(accelerate, "owner/resnet50")["parameters"] == 8
    assert asked == [("resnet18", {"num_classes": 7}), ("resnet50", {}), ("hf-hub:owner/resnet50", {})]


@cases(
    "answer, kind, message",
    ("gated", OSError, "is gated: agree to its terms"),
    ("repo", OSError, "is not there, or private"),
    (False, OSError, "The Hub cannot be reached"),
    (types.SimpleNamespace(library_name=None), ValueError, "give --library_name"),
    (types.SimpleNamespace(library_name="keras"), ValueError, "'keras'"),
)
def test_models_that_cannot_be_built(refused, monkeypatch, answer, kind, message):
    monkeypatch.setattr(public, "verify_on_hub", lambda repo, token=None: answer)
    with pytest.raises(kind, match=message) as caught:
        estimate.create_empty_model("owner/name", None)
    assert isinstance(caught.value, LaunchError)
    assert message in refused("estimate-memory", "owner/name")


def test_library_that_cannot_be_imported(refused, place, monkeypatch):
    """It is broken, as one with compiled parts for another version of torch."""
    (place / "timm.py").write_text("raise RuntimeError('operator x::y does not exist')")
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.syspath_prepend(place)
    with pytest.raises(ImportError, match="timm cannot be imported"):
        estimate.create_empty_model("x", "timm")
    assert "timm cannot be imported: operator x::y" in refused("estimate-memory", "x", "--library_name", "timm")


@pytest.fixture
def blocks():
    """1000 numbers outside of blocks, and blocks of 300, 200 and 100: 1600 in all."""
    layers = nn.ModuleList(nn.Linear(10, rows, bias=False) for rows in (30, 20, 10))
    return inventory_of_model(nn.ModuleDict({"embed": nn.Linear(10, 100, bias=False), "layers": layers}), "a test")


# Weights, gradients, optimizer, working, for the 1600 numbers on 4 ranks.
@cases(
    "strategy, dtype, expected",
    ("ddp", "float32", (6400, 6400, 12800, 6400)),
    ("ddp", "float16", (6400, 6400, 12800, 6400 + 3200)),
    # 25 + 8 + 5 + 3 rows of 10; the root, the two largest blocks, and the gradients of the root.
    ("fsdp", "float32", (4 * 410, 4 * 410, 8 * 410, 4 * (1000 + 300 + 200 + 1000))),
    ("fsdp", "bfloat16", (4 * 410, 4 * 410, 8 * 410, 2 * (1000 + 300 + 200 + 1000))),
    ("shard_grad_op", "float16", (4 * 410, 4 * 410, 8 * 410, 2 * (1600 + 1000))),
    # DeepSpeed 0.19.8 allocates all of the bucket, however few gradients there are.
    ("zero1", "float16", (3200, 3200, 12 * 400, 2 * 500_000_000)),
    ("zero1", "float32", (6400, 6400, 12 * 400, 4 * 500_000_000)),
    ("zero2", "float16", (3200, 800, 12 * 400, 2 * 500_000_000)),
    ("zero3", "float16", (800, 800, 12 * 400, 2 * 2 * 1000)),
)
def test_ranks(blocks, strategy, dtype, expected):
    needs = training(blocks, dtype, strategy, 4)
    assert sizes(needs) == expected
    assert needs["total"] == sum(expected)


def sizes(needs):
    return tuple(needs[part] for part in ("weights", "gradients", "optimizer", "working"))


def test_one_process_and_odd_shapes(blocks):
    """FSDP pads what it cannot cut: the first rank keeps a whole row."""
    for words, bytes_of_a_number in ((("float32",), 16), (("float16",), 18), (("float16", "zero2", 1), 16)):
        assert training(blocks, *words)["total"] == bytes_of_a_number * 1600, "no other rank, no bucket"
    small = nn.ParameterDict({"weight": torch.zeros(2, 10), "scale": torch.zeros(())})
    assert training(inventory_of_model(small, "a test"), "float32", "fsdp", 8)["weights"] == 4 * (10 + 1)


def step(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(10)[None]).sum().backward()
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


@pytest.fixture
def group_of():
    """A process group whose other ranks are not there: what a rank keeps does not depend on them."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def make(size):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
        return dist.init_device_mesh("cpu", (size,))

    yield make
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_real_step(group_of, ranks):
    model = net(tied=ranks % 2 == 0)
    needs = training(inventory_of_model(model, "a test"), "float32", "ddp" if ranks == 1 else "fsdp", ranks)
    if ranks > 1:
        mesh = group_of(ranks)
        for layer in model.blocks:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    assert allocated(model, step(model)) == sizes(needs)[:3]
    assert needs["working"] or ranks == 1
