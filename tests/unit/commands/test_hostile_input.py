"""Attacks by files, folders and variables that others wrote: what a command prints steers no terminal, and nothing of them is run."""

import contextlib
import io
import json
import os
import re
import sys

import pytest
import torch
from safetensors.torch import save_file

import checkpoint_samples as samples
from accelerate.base._warn import printable
from accelerate.base.table import table
from accelerate.extensions.hang.status import RankStatus
from accelerate.launch.errors import Reporter, endings_of, failure_of
from accelerate.runtime import failure
from cases import cases

# Sets the title of the window; colours; the C1 form; turns letters around; rings, and goes back to the start of the line.
ESCAPES = "\x1b]0;owned\x07 \x1b[31m \x9b2J \u202e\u2066 \x08\r"
STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
SHOWN = r"\x1b]0;owned\x07"


@cases(
    "text, limit, shown",
    (ESCAPES, None, r"\x1b]0;owned\x07 \x1b[31m \x9b2J \u202e\u2066 \x08\x0d"),
    ("a\tb\nc é 漢 \\x1b", None, "a\tb\nc é 漢 \\x1b"),
    ("\x7f\u2028\ud800", None, r"\x7f\u2028\ud800"),
    ("abcd", 4, "abcd"),
    ("abcde\x1b", 4, "abcd…"),
)
def test_what_is_printable(text, limit, shown):
    assert printable(text, limit) == shown == printable(shown)


def manifest(place):
    """A checkpoint whose manifest names tensors, tied weights and versions with escapes."""
    folder = samples.write(place / "c", weights={f"w{ESCAPES}": torch.zeros(2)})
    path = folder / "accelerate_manifest.json"
    content = json.loads(path.read_text())
    entry = content["files"].pop("optimizer.bin")
    entry["aliases"] = {f"a{ESCAPES}": f"b{ESCAPES}"}
    content["files"][f"o{ESCAPES}"] = entry
    content |= {"versions": {f"v{ESCAPES}": ESCAPES}, "strategy": f"ddp{ESCAPES}"}
    path.write_text(json.dumps(content))
    (folder / "optimizer.bin").rename(folder / f"o{ESCAPES}")


def folders(place):
    samples.foreign(place / "c" / f"epoch{ESCAPES}")
    aside = place / "c" / f".saving_{ESCAPES}"
    aside.mkdir()
    (aside / ".accelerate_save").write_text(f"epoch{ESCAPES}")


def weights(place):
    (place / "c").mkdir()
    for letter in "ab":
        save_file({"w": torch.zeros(1)}, place / "c" / f"{letter}{ESCAPES}.safetensors")


def left(place):
    """What a rank has left that raised such an exception."""
    folder = place / "c" / f"accelerate-1_{ESCAPES}" / "attempt_0" / "0"
    folder.mkdir(parents=True)
    (folder / "error.json").write_text(json.dumps({failure.OURS: {"traceback": f"ValueError: {ESCAPES}"}}))
    (folder / failure.STACKS).write_text(ESCAPES)


def settings(place):
    text = json.dumps({"distributed_type": "NO", "main_training_function": f"f{ESCAPES}", f"key{ESCAPES}": ESCAPES})
    (place / "c").write_text(text)
    os.environ["ACCELERATE_OWN"] = ESCAPES.replace("\x00", "")


def script(place):
    (place / "train.py").touch()
    settings(place)
    (place / "c").write_text('{"distributed_type": "NO"}')


@cases(
    "make, words, status",
    (manifest, "checkpoint info c --tensors", 0),
    (manifest, "checkpoint info c --tensors --json", 0),
    (manifest, "checkpoint verify c", 0),
    (manifest, "checkpoint ls c", 0),
    (folders, "checkpoint ls c", 0),
    (folders, "checkpoint verify c", 0),
    (folders, "checkpoint prune c --keep 1 --incomplete --foreign --dry_run", None),
    (weights, "estimate-memory c", 2),
    (left, "diagnose c", 0),
    (settings, "env --config_file c", 0),
    (settings, "config show --config_file c", None),
    (settings, "config validate c", 2),
    (script, "launch --dry_run --cpu --config_file c train.py", 0),
)
def test_no_command_prints_what_steers_a_terminal(accelerate, place, monkeypatch, make, words, status):
    monkeypatch.setenv("ACCELERATE_OWN", "")  # to be put back
    make(place)
    got, out, err = accelerate(*words.split())
    assert status in (None, got), err
    assert not STEERS.search(out + err), repr(STEERS.search(out + err))
    if "--json" not in words and "launch" not in words and (make, words) != (manifest, "checkpoint verify c"):
        assert SHOWN in out + err, out + err


def test_a_name_with_a_line_break_forges_no_row_of_a_table():
    text = table(["NAME", "STATE"], [["a\nb  whole", "damaged"], ["c\x1b[1m", "whole"]])
    assert text.splitlines()[1:] == [r"a\nb  whole  damaged", r"c\x1b[1m     whole"]


def test_the_launcher_prints_what_ranks_and_machines_say_without_control_characters(monkeypatch):
    class ChildError(Exception):
        def __init__(self, failures):
            self.failures = failures

    class Ended:
        pid, exitcode, died, timestamp, fault = 7, 1, 0.0, 0, ESCAPES

        def __init__(self, text):
            record = {"summary": text, "traceback": text, "where": text, "host": text}
            self.error_file_data = {failure.OURS: record}

    said = []
    failures = {0: Ended(f"first {ESCAPES}"), 1: Ended(f"second {ESCAPES}")}
    Reporter(write=said.append).failed(failures, 1, 2)
    with contextlib.redirect_stderr(io.StringIO()) as err:
        Reporter().tell(*Reporter.about(endings_of(failures)), failure_of(ChildError(failures))[1])
    text = "".join(said) + err.getvalue()
    assert "first" in text and "second" in text and SHOWN in text and not STEERS.search(text)


@cases(
    "status",
    RankStatus(1, ended=True, note=f"E: {ESCAPES}{'x' * 1000}"),
    RankStatus(1, True, site=f"x{ESCAPES}", inside=ESCAPES),
)
def test_what_another_rank_says_of_itself_is_bounded_and_steers_nothing(status):
    assert SHOWN in str(status) and not STEERS.search(str(status)) and len(str(status)) < 500


@pytest.mark.parametrize(
    "named",
    [
        ["AutoModel"], ["pipeline"], "pipeline", ["PreTrainedModel"], ["logging"], ["Trainer"], [7], {"pipeline": 1},
        ["pipeline", "LlamaForCausalLM"], [["pipeline"]],
    ],
    ids=str,
)  # fmt: skip
def test_a_configuration_names_models_alone(accelerate, place, monkeypatch, named):
    transformers = pytest.importorskip("transformers")
    called = []
    for name in ("pipeline", "Trainer"):
        monkeypatch.setattr(transformers, name, lambda *args, **rest: called.append(args), raising=False)
    sizes = {"vocab_size": 100, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes |= {"hidden_size": 16, "intermediate_size": 32}
    (place / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, "architectures": named}))
    status, out, err = accelerate("estimate-memory", "config.json")
    assert not called and "Traceback" not in err
    assert status == 2 or f"(Llama{'ForCausalLM' if 'Llama' in str(named) else 'Model'})" in out, err


@pytest.mark.parametrize("named", ["hf-hub:somebody/model", "local-dir:/x", "timm/resnet18", "../x", 7, None, ["x"]])
def test_a_configuration_of_timm_names_an_architecture_alone(accelerate, place, monkeypatch, named):
    asked = []
    library = type(sys)("timm")
    library.create_model = lambda name, **options: asked.append(name)
    monkeypatch.setitem(sys.modules, "timm", library)
    (place / "config.json").write_text(json.dumps({"architecture": named}))
    status, out, err = accelerate("estimate-memory", "config.json")
    assert (status, asked) == (2, []) and "architecture" in err
