"""Weights of checkpoints as folders that Hugging Face's libraries read."""

import contextlib
import functools
import itertools
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemWriter, save

import checkpoint_samples as samples
from accelerate.checkpoint.manifest import NAME, PARTS_FOLDER, DamagedCheckpoint, weight_map
from accelerate.extensions.convert.convert import export
from accelerate.extensions.export.files import write_weights
from cases import cases
from sharded_io import same


def converted(weights, dtype):
    new = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, None: None}[dtype]
    return {name: value.to(new) if new and value.is_floating_point() else value for name, value in weights.items()}


def loaded(folder):
    """All tensors of an exported folder, which must have no other files."""
    files = {path.name for path in folder.iterdir()}
    if files == {"model.safetensors"}:
        return load_file(folder / "model.safetensors")
    shards = weight_map((folder / "model.safetensors.index.json").read_text(), "index")
    assert files == {*shards, "model.safetensors.index.json"}
    found = {}
    for shard, tensors in shards.items():
        read = load_file(folder / shard)
        assert set(read) == set(tensors)
        found.update(read)
    return found


def test_huggingface_reads_it(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=50
    )
    model = transformers.BertForMaskedLM(config)
    weights = model.state_dict()
    source = samples.write(tmp_path / "checkpoint_0", weights=weights, safe=False)
    export(source, tmp_path / "out", max_shard_size=5_000)
    config.save_pretrained(tmp_path / "out")
    again = transformers.BertForMaskedLM.from_pretrained(tmp_path / "out")
    assert same(again.state_dict(), weights)
    assert again.cls.predictions.decoder.weight is again.bert.embeddings.word_embeddings.weight


def test_values_beyond_a_dtype(tmp_path):
    weights = {"a": torch.tensor([1.0, 1e6]), "b": torch.tensor([float("inf"), float("nan")])}
    source = samples.write(tmp_path / "checkpoint_0", weights=weights)
    with pytest.raises(ValueError, match="'a' has values that F16 cannot hold"):
        export(source, tmp_path / "out", dtype="fp16")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint_0"}
    export(source, tmp_path / "out", dtype="bf16")
    assert loaded(tmp_path / "out")["b"].isinf().tolist() == [True, False]


def test_tied_weights(tmp_path):
    from huggingface_hub import load_state_dict_from_file

    weights = samples.tensors()
    source = samples.write(tmp_path / "checkpoint_0", weights=weights, aliases={"head.weight": "embed.weight"})
    export(source, tmp_path / "out")
    assert same(load_state_dict_from_file(tmp_path / "out" / "model.safetensors"), weights)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}


def test_names_of_compiled_models(tmp_path):
    weights = {"_orig_mod.a": torch.ones(2), "b._orig_mod.c": torch.zeros(1), "my_orig_mod.d": torch.ones(3)}
    source = samples.write(tmp_path / "checkpoint_0", weights=weights)
    export(source, tmp_path / "out")
    assert set(loaded(tmp_path / "out")) == {"a", "b.c", "my_orig_mod.d"}
    source = samples.write(tmp_path / "checkpoint_1", weights={**weights, "a": torch.ones(1)})
    with pytest.raises(ValueError, match="one name"):
        export(source, tmp_path / "out1")


@pytest.mark.parametrize("safe", [True, False])
def test_shards_of_save_model(tmp_path, safe):
    from accelerate import Accelerator

    model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.Linear(9, 9))
    Accelerator(cpu=True).save_model(model, tmp_path / "saved", max_shard_size=400, safe_serialization=safe)
    assert len(list((tmp_path / "saved").iterdir())) == 3
    export(tmp_path / "saved", tmp_path / "out")
    assert same(loaded(tmp_path / "out"), model.state_dict())
    next((tmp_path / "saved").glob("*-00002-*")).unlink()
    with pytest.raises(DamagedCheckpoint, match="00002-of-00002"):
        export(tmp_path / "saved", tmp_path / "out2")


def test_sharded_format_of_torch(tmp_path):
    folder = tmp_path / "checkpoint_0" / "pytorch_model_fsdp_0"
    save({"model": samples.tensors()}, storage_writer=FileSystemWriter(folder), no_dist=True)
    for dtype, size in ((None, 5_000), ("bf16", 60)):
        export(tmp_path / "checkpoint_0", tmp_path / f"out{size}", dtype=dtype, max_shard_size=size)
        assert same(loaded(tmp_path / f"out{size}"), converted(samples.tensors(), dtype))
    save({"model": {"a": torch.ones(1), "b": "text"}}, storage_writer=FileSystemWriter(folder), no_dist=True)
    with pytest.raises(ValueError, match="cannot hold 'b'"):
        export(tmp_path / "checkpoint_0", tmp_path / "none")


def test_a_second_model(tmp_path):
    source, wanted = samples.write(tmp_path / "checkpoint_0", model=1), samples.tensors()
    export(source, tmp_path / "out", model=1)
    assert same(loaded(tmp_path / "out"), wanted)
    with pytest.raises(FileNotFoundError, match="no weights of model 0.*model_1.safetensors"):
        export(source, tmp_path / "none")
    (tmp_path / "two").mkdir()
    write_weights(tmp_path / "two", {"other": torch.ones(9)}, "model{suffix}.safetensors", 60)
    write_weights(tmp_path / "two", wanted, "model_1{suffix}.safetensors", 60)
    export(tmp_path / "two", tmp_path / "shards", model=1)
    assert same(loaded(tmp_path / "shards"), wanted)


def test_the_layout_that_the_manifest_lists(tmp_path):
    source = samples.write(tmp_path / "checkpoint_0")
    older = {"model": {"old": torch.ones(1)}}
    save(older, storage_writer=FileSystemWriter(source / "pytorch_model_fsdp_0"), no_dist=True)
    export(source, tmp_path / "out")
    assert same(loaded(tmp_path / "out"), samples.tensors())
    (source / NAME).unlink()
    with pytest.raises(ValueError, match=r"pytorch_model_fsdp_0 and model\.safetensors\. Nothing says"):
        export(source, tmp_path / "out2")
    assert not (tmp_path / "out2").exists()


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", None])
@pytest.mark.parametrize("safe", [True, False])
def test_dtypes(tmp_path, dtype, safe):
    """Integers and complex numbers stay as they are; small floats become larger ones."""
    values = torch.tensor([0.5, 1.0, 2.0, 4.0, 16.0])
    weights = {**samples.tensors(), "complex": torch.ones(2, dtype=torch.complex64)}
    small = {name: values for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu") if hasattr(torch, name)}
    stored = {**weights, **{name: values.to(getattr(torch, name)) for name in small}}
    source = samples.write(tmp_path / "checkpoint_0", weights=stored, safe=safe)
    export(source, tmp_path / "out", dtype=dtype)
    assert same(loaded(tmp_path / "out"), converted({**weights, **small}, dtype) if dtype else stored)


def test_damaged_and_incomplete_ones(tmp_path, caplog):
    source = samples.write(tmp_path / "checkpoint_0")
    (source / "optimizer.bin").unlink()
    export(source, tmp_path / "weights")
    assert "optimizer.bin is missing" in caplog.text
    assert same(loaded(tmp_path / "weights"), samples.tensors())
    samples.flip(source / "model.safetensors")
    with pytest.raises(DamagedCheckpoint, match="model.safetensors has changed"):
        export(source, tmp_path / "out")
    (source / NAME).unlink()
    (source / PARTS_FOLDER).mkdir()
    with pytest.raises(DamagedCheckpoint, match="manifest .* is missing"):
        export(source, tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        export(tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@cases(
    "content, error, message",
    ({"a": torch.ones(1), "extra": b"state"}, ValueError, "'extra'"),
    ([torch.ones(1)], DamagedCheckpoint, "not a state dict"),
    ({"a": torch.ones(3).to_sparse()}, ValueError, "'a'"),
)
def test_what_safetensors_cannot_hold(tmp_path, content, error, message):
    (tmp_path / "c").mkdir()
    torch.save(content, tmp_path / "c" / "pytorch_model.bin")
    with pytest.raises(error, match=message):
        export(tmp_path / "c", tmp_path / "out")


def test_target_in_use(tmp_path):
    source, out = samples.write(tmp_path / "checkpoint_0"), tmp_path / "out"
    (tmp_path / "file").write_text("mine")
    out.mkdir()
    export(source, out)  # an empty folder is free
    others = samples.write(tmp_path / "checkpoint_1"), samples.foreign(tmp_path / "epoch_1")
    for target, message, overwrite in (
        (out, "not empty", False),
        (tmp_path / "file", "is a file", False),
        *((folder, "holds the checkpoint", True) for folder in (source, tmp_path)),
        *((folder, "is a checkpoint", True) for folder in others),
    ):
        with pytest.raises(FileExistsError, match=message):
            export(source, target, overwrite=overwrite)
    with pytest.raises(ValueError, match="URL"):
        export(source, "memory://bucket/out")


@pytest.mark.parametrize("size", [10_000, 60])
def test_a_kill_at_any_step_leaves_no_mixture(tmp_path, monkeypatch, size):
    old, new = {"old": torch.ones(50), "older": torch.ones(50)}, samples.tensors()
    first = samples.write(tmp_path / "checkpoint_0", weights=old)
    second = samples.write(tmp_path / "checkpoint_1")
    steps = {name: getattr(os, name) for name in ("replace", "unlink", "remove")}
    for step in range(14):
        out, counted = tmp_path / f"out{step}", itertools.count()
        export(first, out, max_shard_size=100)

        def killed(*paths, counted=counted, step=step, name="", **options):
            if next(counted) == step:
                raise KeyboardInterrupt
            steps[name](*paths, **options)

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            for name in steps:
                patch.setattr(os, name, functools.partial(killed, name=name))
            export(second, out, max_shard_size=size, overwrite=True)
        # A reader takes the single file, or goes by the index; where it finds neither, it has no model.
        read, index = {}, out / "model.safetensors.index.json"
        if (out / "model.safetensors").exists():
            read = load_file(out / "model.safetensors")
        elif index.exists():
            for file in weight_map(index.read_text(), "x"):
                read.update(load_file(out / file))
        assert not read or same(read, old) or same(read, new), step
        export(second, out, max_shard_size=size, overwrite=True)
        assert same(loaded(out), new)


def test_a_name_in_two_shards(tmp_path):
    folder = tmp_path / "c"
    folder.mkdir()
    for file in ("a.safetensors", "b.safetensors"):
        save_file({"x": torch.ones(1)}, folder / file)
    index = '{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(DamagedCheckpoint, match="two values of the name 'x'"):
        export(folder, tmp_path / "out")
