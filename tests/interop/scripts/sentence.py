"""sentence-transformers' trainer on a tiny encoder."""

import sys

from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import CoSENTLoss
from tiny import bert_config, losses, report, sentences, tokenizer
from transformers import BertModel, set_seed

folder = sys.argv[1]
set_seed(0)
BertModel(bert_config()).save_pretrained(folder + "/bert")
tokenizer().save_pretrained(folder + "/bert")
model = SentenceTransformer(folder + "/bert", device="cpu")
data = Dataset.from_dict(
    {"sentence1": sentences(32, 1), "sentence2": sentences(32, 2), "score": [(i % 5) / 4 for i in range(32)]}
)
arguments = SentenceTransformerTrainingArguments(
    output_dir=folder, per_device_train_batch_size=4, max_steps=4, learning_rate=1e-3, logging_steps=1,
    save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=4,
)  # fmt: skip
trainer = SentenceTransformerTrainer(model, arguments, train_dataset=data, loss=CoSENTLoss(model))
trainer.train()
report(sentence=losses(trainer))
