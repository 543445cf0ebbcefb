"""Open a sparse checkpoint of compressed-tensors, dense and kept packed, and save it again in both forms.

    python examples/compress_checkpoint.py FOLDER_OR_REPOSITORY OUT

tests/golden/sparse-24-bitmask is one that the old library wrote.
"""

import argparse
from pathlib import Path

from transformers import AutoModelForCausalLM

from hf_sparse24 import ModelCompressor, Sparse24Config
from hf_sparse24.report import inspect_folder, render_table


def main() -> None:
    """Writes OUT/dense, OUT/kept and OUT/compressed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="a checkpoint in the format sparse-24-bitmask or sparse-bitmask")
    parser.add_argument("out", type=Path, help="a new folder")
    arguments = parser.parse_args()
    print(render_table(inspect_folder(arguments.model)))

    # Plain nn.Linear layers: an ordinary model, saved as an ordinary checkpoint.
    dense = AutoModelForCausalLM.from_pretrained(arguments.model, quantization_config=Sparse24Config(run_compressed=False))
    dense.save_pretrained(arguments.out / "dense")

    # Layers that stay packed: what is saved are the tensors that were loaded.
    kept = AutoModelForCausalLM.from_pretrained(arguments.model, quantization_config=Sparse24Config(run_compressed=True))
    kept.save_pretrained(arguments.out / "kept")

    # The dense model, packed again in the checkpoint's own format.
    config = ModelCompressor.from_pretrained(arguments.model).sparsity_config
    dense.save_pretrained(arguments.out / "compressed", sparsity_config=config)

    for name in ("dense", "kept", "compressed"):
        size_bytes = sum(file.stat().st_size for file in (arguments.out / name).glob("*.safetensors"))
        print(f"{arguments.out / name}: {size_bytes} bytes of weights")


if __name__ == "__main__":
    main()
