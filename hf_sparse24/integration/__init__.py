"""The hooks into Transformers: `load` around `from_pretrained`, `save` around `save_pretrained` and `push_to_hub`."""
