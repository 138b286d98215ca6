"""Checkpoints of transformers' Trainer when the model is sharded, has adapters, or belongs to another library's Trainer.

`trainer_strategies.py FOLDER CASE ...` trains each case whole and in two parts; in `CASE:CASE` the second part trains by another strategy. `--kill SEED COUNT FOLDER CASE ...` imports the libraries once,
and starts and kills runs of two ranks, as forks. A case is a strategy with words: `fsdp2+sharded+async`.
"""

import contextlib
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import sys
import threading
import time

import tiny
import torch
from killing import fork, wait_and_kill, written
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

import transformers_patch
from accelerate import ParallelismConfig
from accelerate.checkpoint import dcp
from accelerate.checkpoint.manifest import NAME, Manifest
from accelerate.runtime.torch_private import local_part
from accelerate.state import PartialState
from transformers_patch.checkpoints import CheckpointMixin, get_last_checkpoint

STEPS = 6
COMMON = {
    "per_device_train_batch_size": 2, "max_steps": STEPS, "learning_rate": 1e-2, "logging_steps": 1, "report_to": [],
    "use_cpu": True, "disable_tqdm": True, "seed": 3,
}  # fmt: skip
BLOCKS = {"transformer_layer_cls_to_wrap": ["GPT2Block"]}
# Models that transformers splits while it loads them.
ARRIVING = {"tp": {"tp_size": 2}, "ep": {"fsdp_size": 2, "ep_size": 2}, "tpfsdp": {"fsdp_size": 2, "tp_size": 2}}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}


def rank():
    return int(os.environ.get("RANK", "0"))


def strategy(words):
    if words[0].startswith("fsdp"):
        kind = "SHARDED_STATE_DICT" if "sharded" in words else "FULL_STATE_DICT"
        config = {"fsdp_version": int(words[0][-1]), "state_dict_type": kind, "use_orig_params": True, **BLOCKS}
        if "llama" in words or "qlora" in words:
            config |= {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "cpu_ram_efficient_loading": False}
        second = {"tp": "tp_size", "hsdp": "dp_replicate_size"}
        found = {"fsdp": "full_shard auto_wrap", "fsdp_config": config}
        for word in second.keys() & words:
            found["parallelism_config"] = ParallelismConfig(**{"dp_shard_size": 2, second[word]: 2})
        return found
    if words[0] == "split":
        return {"parallelism_config": ParallelismConfig(tp_size=2)}
    if words[0].startswith("zero"):
        auto = (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "gradient_clipping",
        )
        zero = {"stage": int(words[0][-1]), "stage3_gather_16bit_weights_on_model_save": "gather" in words}
        if words[0] == "zero3":
            zero["stage3_param_persistence_threshold"] = 0
        return {
            "deepspeed": {
                **dict.fromkeys(auto, "auto"),
                "zero_optimization": zero,
                "zero_allow_untested_optimizer": True,
            }
        }
    return {}


def build(folder, words, **more):
    os.makedirs(folder, exist_ok=True)
    ours = () if "apply" in words else (CheckpointMixin,)

    def kind_of(base):
        return type("Own", (*ours, tiny.Exact, base), {"checkpoints": "async"} if "async" in words else {})

    make = quantized if "qlora" in words else LIBRARIES.get(words[0], plain)
    return make(kind_of, folder, words, {**COMMON, "save_steps": 2, **strategy(words), **more})


def plain(kind_of, folder, words, options):
    model, rows = tiny.causal_model(), tiny.TokenRows(32)
    if "llama" in words or "experts" in words:
        model = llama(folder, 4 if "experts" in words else 0).train()
    if "lora" in words:
        model = adapted(model)
    if words[0] == "stream":
        # The short one is in its second pass at step 4, and then has two batches of each rank left.
        rows = Stream(tiny.TokenRows(6 * int(os.environ.get("WORLD_SIZE", "1"))) if "short" in words else rows)
    trainer = kind_of(Trainer)(
        model, TrainingArguments(folder, **options), train_dataset=rows, processing_class=tiny.tokenizer()
    )
    if "average" in words:
        trainer.add_callback(Averaging(trainer))
    return trainer


class Averaging(TrainerCallback):
    """Keeps a moving average of the weights; what this rank has of it counts as the last loss."""

    def __init__(self, trainer):
        self.trainer = trainer

    def on_train_begin(self, args, state, control, **_):
        self.average = self.trainer.accelerator.ema(self.trainer.model_wrapped, decay=0.8)

    def on_train_end(self, args, state, control, **_):
        with self.average.applied():
            own = [local_part(each.detach()) for each in self.trainer.model_wrapped.parameters()]
            self.trainer.losses.append(sum(each.double().abs().sum().item() for each in own).hex())


def adapted(model, **options):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(**{**LORA, **options}))


class Stream(torch.utils.data.IterableDataset):
    """Rows in an order that each pass draws again, as `set_epoch` tells."""

    def __init__(self, rows):
        self.rows, self.epoch = rows, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        order = list(range(len(self.rows)))
        random.Random(self.epoch).shuffle(order)
        return (self.rows[number] for number in order)


def shuffled(kind_of, folder, words, options):
    from datasets import Dataset

    data = Dataset.from_list([{name: value.tolist() for name, value in row.items()} for row in tiny.TokenRows(32)])
    rows = data.to_iterable_dataset(num_shards=2).shuffle(seed=1, buffer_size=7)
    return kind_of(Trainer)(
        tiny.causal_model(),
        TrainingArguments(folder, **options),
        train_dataset=rows,
        processing_class=tiny.tokenizer(),
    )


def of_trl(kind_of, folder, words, options):
    """SFT, preferences and rewards. What it trains on are sentences."""
    import trl
    from datasets import Dataset

    name = {"sft": "SFT", "dpo": "DPO", "reward": "Reward"}[words[0]]
    config = getattr(trl, f"{name}Config")(folder, **options, bf16=False, gradient_checkpointing=False, max_length=24)
    columns = {"sft": ["text"], "dpo": ["prompt", "chosen", "rejected"], "reward": ["chosen", "rejected"]}[words[0]]
    data = Dataset.from_dict({column: tiny.sentences(32, seed) for seed, column in enumerate(columns)})
    model = tiny.causal_model()
    if words[0] == "reward":
        from transformers import GPT2ForSequenceClassification

        model.config.num_labels = 1
        model = GPT2ForSequenceClassification(model.config)
    rest = {"ref_model": tiny.causal_model(1)} if words[0] == "dpo" else {}
    if "lora" in words:
        from peft import LoraConfig

        rest = {"peft_config": LoraConfig(**LORA)}
    return kind_of(getattr(trl, f"{name}Trainer"))(
        model=model, args=config, train_dataset=data, processing_class=tiny.tokenizer(), **rest
    )


def of_sentences(kind_of, folder, words, options):
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.losses import CoSENTLoss
    from transformers import BertModel

    set_seed(0)
    BertModel(tiny.bert_config()).save_pretrained(f"{folder}/bert")
    tiny.tokenizer().save_pretrained(f"{folder}/bert")
    model = SentenceTransformer(f"{folder}/bert", device="cpu")
    scores = {"score": [(number % 5) / 4 for number in range(32)]}
    data = Dataset.from_dict({"sentence1": tiny.sentences(32, 1), "sentence2": tiny.sentences(32, 2), **scores})
    return kind_of(SentenceTransformerTrainer)(
        model, Arguments(folder, **options), train_dataset=data, loss=CoSENTLoss(model)
    )


def llama(folder, experts=0, **options):
    """A model that is loaded from a folder, which rank 0 writes."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    if rank() == 0 and not os.path.isdir(f"{folder}/base"):
        set_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        sizes |= {"vocab_size": 24, "num_key_value_heads": 2, "pad_token_id": 0}
        if experts:
            made = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=experts))
        else:
            made = LlamaForCausalLM(LlamaConfig(**sizes))
        made.save_pretrained(f"{folder}/base")
    PartialState(cpu=True).wait_for_everyone()
    set_seed(0)
    return AutoModelForCausalLM.from_pretrained(f"{folder}/base", **options)


def quantized(kind_of, folder, words, options):
    from transformers import BitsAndBytesConfig

    types = dict.fromkeys(["bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"], torch.float32)
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", **types)
    model = llama(folder, quantization_config=four, dtype=torch.float32)
    model = adapted(model, target_modules=["q_proj", "v_proj"], fan_in_fan_out=False)
    arguments = TrainingArguments(folder, **options)
    return kind_of(Trainer)(model, arguments, train_dataset=tiny.TokenRows(32), processing_class=tiny.tokenizer())


def tensors(kind_of, folder, words, options):
    """A model that arrives split, by transformers' own plan. The Trainer alone saves its weights, and nothing that continues."""
    from transformers.distributed import DistributedConfig

    arguments = TrainingArguments(folder, **options, save_only_model="weights" in words)
    sizes = DistributedConfig(**ARRIVING[words[0]])
    model = llama(folder, 4 if words[0] == "ep" else 0, distributed_config=sizes).train()
    if "lora" in words:
        model = adapted(model, target_modules=["q_proj", "v_proj"], fan_in_fan_out=False)
    return kind_of(Trainer)(model, arguments, train_dataset=tiny.TokenRows(32), processing_class=tiny.tokenizer())


LIBRARIES = {
    "sft": of_trl, "dpo": of_trl, "reward": of_trl, "sentence": of_sentences, **dict.fromkeys(ARRIVING, tensors),
    "shuffled": shuffled,
}  # fmt: skip


@contextlib.contextmanager
def patched(words):
    way = "async" if "async" in words else True
    with tiny.apart(), transformers_patch.applied(checkpoints=way) if "apply" in words else contextlib.nullcontext():
        yield


def files(folder):
    found = {path.relative_to(folder).as_posix() for path in pathlib.Path(folder).rglob("*") if path.is_file()}
    return found - {NAME}


def damage(folder, words):
    """Cut off the largest file of the newest checkpoint, as a broken disk would, and add a newer one that is written half."""
    largest = max((pathlib.Path(folder, name) for name in files(folder)), key=lambda path: path.stat().st_size)
    with open(largest, "r+b") as file:
        file.truncate(largest.stat().st_size // 2)
    half = pathlib.Path(folder).with_name(f"checkpoint-{STEPS + 2}")
    shutil.copytree(pathlib.Path(folder).with_name("checkpoint-2"), half)
    (half / NAME).unlink()
    # What is written last of a sharded set, or else the generators.
    for last in [*half.rglob(".metadata"), *half.glob("latest")] or half.glob("rng_state*"):
        last.unlink()


@contextlib.contextmanager
def noting_shards():
    """Give a list with an entry for each folder of shards that a thread writes: whether the training's own group writes it."""
    save, in_training_group = dcp.save, []

    def noted(state, place, group=None, **options):
        if threading.current_thread() is not threading.main_thread():
            in_training_group.append(group is None)
        return save(state, place, group, **options)

    dcp.save = noted
    try:
        yield in_training_group
    finally:
        dcp.save = save


def halves(folder, case):
    """Train whole, and once more from the middle; return whether the losses are the same, and what the checkpoint has."""
    words = case.split("+")
    folder = f"{folder}/{case}"
    with patched(words), noting_shards() as in_training_group:
        whole = build(folder, words)
        whole.train()
        by_rank = tiny.everywhere(whole.losses)
        last = f"{folder}/checkpoint-{STEPS}"
        listed = {name: entry.rank for name, entry in Manifest.read(last).files.items()}
        found = {"files": listed, "unlisted": sorted(files(last) ^ listed.keys())}
        found["in_training_group"] = in_training_group
        if "weights" in words:
            return found
        tiny.everywhere(None)
        if rank() == 0:
            damage(last, words)
        tiny.everywhere(None)
    with patched(words):
        resumed = build(folder, words)
        resumed.train(resume_from_checkpoint=True)
        found["whole"] = by_rank
        found["rest"] = tiny.everywhere(getattr(resumed, "losses", []))
        found["equal"] = found["rest"] == [one[4:] for one in by_rank]
        found["rotten"] = [name for name in os.listdir(folder) if name.startswith(".saving")]
    return found


def across(folder, pair):
    """Train whole, and on from the middle by another strategy; return the losses of both, as they are logged for all ranks."""
    first, then = (words.split("+") for words in pair.split(":"))
    folder = f"{folder}/{pair.replace(':', '-')}"
    shared = {"split": 2, "tp": 2, "tpfsdp": 2}  # so many ranks see the same batch
    world = int(os.environ.get("WORLD_SIZE", "1"))
    with patched(first):
        whole = build(folder, first, per_device_train_batch_size=4 * shared.get(first[0], 1) // world)
        whole.train()
        expected = tiny.losses(whole)
    with patched(then):
        resumed = build(folder, then, per_device_train_batch_size=4 * shared.get(then[0], 1) // world)
        try:
            resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-4")
        except (ValueError, RuntimeError) as error:
            return {"refused": tiny.everywhere(str(error))}
    found = tiny.losses(resumed)
    worst = max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))
    return {"worst": worst, "whole": expected, "found": found}


# -- kills -------------------------------------------------------------------------------------------------------------


def train(folder, words):
    """Train, from the newest checkpoint, if there is one; with a save after every step, or none at all."""
    reference = "reference" in words
    more = {"save_strategy": "no"} if reference else {"save_steps": 1, "save_total_limit": 1}
    last = None if reference else os.path.isdir(folder) and get_last_checkpoint(folder)
    with patched(words):
        trainer = build(folder, words, **more)
        if not (last and last.endswith(f"checkpoint-{STEPS}")):
            trainer.train(resume_from_checkpoint=bool(last))


def port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Pair:
    """Two ranks, as forks of this process."""

    def __init__(self, folder, words):
        self.folder, place = pathlib.Path(folder), port()
        log, self.codes = f"{folder}.log", {}
        self.pids = [fork(log, self._begin, number, place, words) for number in range(2)]

    def _begin(self, number, place, words):
        world = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": place}
        os.environ |= {name: str(value) for name, value in world.items()} | {"MASTER_ADDR": "127.0.0.1"}
        torch.set_num_threads(1)
        train(str(self.folder), words)

    def runs(self):
        for pid in self.pids:
            if pid not in self.codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[pid] = os.waitstatus_to_exitcode(status)
        return len(self.codes) < 2 and not any(self.codes.values())

    def kill(self, ranks):
        """Kill some ranks, and then those that are left, as a launcher does."""
        for pid in [*(self.pids[number] for number in ranks), *self.pids]:
            if self.runs() or pid not in self.codes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        while len(self.codes) < 2:
            self.runs()

    def ended(self):
        while self.runs():
            time.sleep(0.01)
        good = not any(self.codes.values())
        if not good:
            self.kill([])
            raise SystemExit(pathlib.Path(f"{self.folder}.log").read_text()[-6000:])


def kills(folder, case, draw, count):
    """Kill a run of two ranks so often, and let it come to its end: every step of every start has the loss of a run never stopped."""
    words, reference, run = case.split("+"), f"{folder}/{case}-reference", f"{folder}/{case}-0"
    Pair(reference, [*words, "reference"]).ended()
    killed = in_saves = 0
    runs = [run]
    for number in range(1, 4 * count):
        if killed >= count and in_saves:  # one of them in a save, however the machine is loaded
            break
        pair = Pair(runs[-1], words)

        def kill(pair=pair):
            pair.kill(draw.choice([[0], [1], [0, 1]]))

        inside = wait_and_kill(runs[-1], draw, kill, pair.runs, killed % 3 != 2)
        if -signal.SIGKILL in pair.codes.values():
            killed += 1
            in_saves += inside
            bad = [code for code in pair.codes.values() if code > 0]
        else:  # it came to its end: begin again, so that there is something to kill
            bad = [code for code in pair.codes.values() if code]
            runs.append(f"{folder}/{case}-{number}")
        if bad and -signal.SIGKILL not in pair.codes.values():
            raise SystemExit(pathlib.Path(f"{pair.folder}.log").read_text()[-6000:])
    for run in runs:
        Pair(run, words).ended()
        for number in range(2):
            whole, found = written(reference, number), written(run, number)
            assert found == whole and len(found) == STEPS, (run, found, whole)
        assert [name for name in sorted(os.listdir(run)) if "checkpoint" in name or "saving" in name] == [
            f"checkpoint-{STEPS}"
        ], os.listdir(run)
    return {"killed": killed, "in_saves": in_saves, "runs": len(runs)}


if __name__ == "__main__":
    if sys.argv[1] == "--kill":
        _, _, seed, count, folder, *cases = sys.argv
        draw = random.Random(int(seed))
        print(json.dumps({case: kills(folder, case, draw, int(count)) for case in cases}))
    else:
        folder, *cases = sys.argv[1:]
        set_seed(0)
        tiny.report(**{case: (across if ":" in case else halves)(folder, case) for case in cases})
