"""`PeftModel.save_pretrained(sparsity_config=...)` is refused, whichever of the two packages is imported first."""

import subprocess
import sys

import pytest

pytest.importorskip("peft")

SCRIPT = """
import sys
for name in {order!r}:
    __import__(name)
    if name == "hf_sparse24" and {order!r}[0] == name:
        assert "peft" not in sys.modules
import peft
from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(LlamaConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=32))
model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
model.save_pretrained({folder!r} + "/adapter")
try:
    model.save_pretrained({folder!r} + "/sparse", sparsity_config="sparse-24-bitmask")
except ValueError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("order", [("hf_sparse24", "peft"), ("peft", "hf_sparse24")], ids="-then-".join)
def test_peft_model_refuses_a_sparsity_config(order, tmp_path):
    script = SCRIPT.format(order=order, folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert "refused: a PeftModel stores its adapter only" in done.stdout, done.stderr
    assert (tmp_path / "adapter" / "adapter_config.json").exists()
    assert not (tmp_path / "sparse").exists()
