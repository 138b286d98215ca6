"""`accelerate estimate-memory` and the functions that place a model say the same of it."""

import json

import pytest

from accelerate import infer_auto_device_map
from accelerate.commands import estimate
from accelerate.utils import calculate_maximum_sizes

SIZES = {
    "vocab_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "hidden_size": 16,
    "intermediate_size": 32,
}
T5 = {"vocab_size": 100, "num_layers": 2, "num_heads": 4, "d_model": 16, "d_kv": 4, "d_ff": 32}
CONFIGURATIONS = {
    "LlamaForCausalLM": {"model_type": "llama", **SIZES, "tie_word_embeddings": False},
    "MistralForCausalLM": {"model_type": "mistral", **SIZES, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "BertForSequenceClassification": {"model_type": "bert", **SIZES},  # with buffers of integers
    "T5ForConditionalGeneration": {"model_type": "t5", **T5},  # three names for one table
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_sizes_are_those_that_a_device_map_is_made_by(accelerate, tmp_path, name):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGURATIONS[name], "architectures": [name]}))
    status, out, error = accelerate("estimate-memory", str(tmp_path), "--dtypes", "float32", "--json")
    assert status == 0, error
    told = json.loads(out)["sizes"][0]
    model = estimate.create_empty_model(str(tmp_path), None)
    assert type(model).__name__ == name
    total, (largest, layers) = calculate_maximum_sizes(model)
    assert (told["total_size"], told["largest_layer"]) == (total, largest)
    assert largest < total and layers

    def devices(budget):
        budgets = {"cpu": budget, "disk": 2 * total}
        return set(infer_auto_device_map(model, budgets, no_split_module_classes=model._no_split_modules).values())

    assert devices(told["total_size"]) == {"cpu"}
    assert devices(told["total_size"] - 1) == {"cpu", "disk"}
