"""Arguments of TRL and sentence-transformers, one imported before apply() and one after it: which, the caller says."""

import importlib
import sys

from shim_tools import build, finish, shared, start, works
from tiny import bert_config, causal_model, sentences, tokenizer

import transformers_patch
from accelerate.state import PartialState


def sft(module, folder, **changes):
    from datasets import Dataset

    arguments = build(
        module.SFTConfig, folder, max_steps=2, bf16=False, gradient_checkpointing=False, max_length=16, **changes
    )
    data = Dataset.from_dict({"text": sentences(16)})
    return module.SFTTrainer(causal_model(), arguments, train_dataset=data, processing_class=tokenizer())


def sentence(module, folder, **changes):
    from datasets import Dataset
    from sentence_transformers.losses import CoSENTLoss
    from transformers import BertModel

    if PartialState().is_main_process:
        BertModel(bert_config()).save_pretrained(folder + "/bert")
        tokenizer().save_pretrained(folder + "/bert")
    PartialState().wait_for_everyone()
    model = module.SentenceTransformer(folder + "/bert", device="cpu")
    pairs = {"sentence1": sentences(16, 1), "sentence2": sentences(16, 2), "score": [(i % 5) / 4 for i in range(16)]}
    arguments = build(module.SentenceTransformerTrainingArguments, folder, max_steps=2, **changes)
    return module.SentenceTransformerTrainer(
        model, arguments, train_dataset=Dataset.from_dict(pairs), loss=CoSENTLoss(model)
    )


MAKERS = {"trl": sft, "sentence_transformers": sentence}


def outcome(name, folder):
    """Return whether a library's trainer shares, which trains, and what the flag is when it is told to reset."""
    module, make, found = importlib.import_module(name), MAKERS[name], []
    folder = f"{folder}/{name}"
    accelerator = start()
    trainer = make(module, folder)
    found.append(shared(accelerator, trainer.args, trainer))
    trainer.train()
    works(accelerator)
    start()
    found.append(make(module, folder, preserve_accelerator_state=False).args.preserve_accelerator_state)
    return found


folder, *order = sys.argv[1:]
before, after = order
getattr(importlib.import_module(before), "SFTConfig" if before == "trl" else "SentenceTransformerTrainingArguments")
assert after not in sys.modules, after
transformers_patch.apply()
finish(before=outcome(before, folder), after=outcome(after, folder))
