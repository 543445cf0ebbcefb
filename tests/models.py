"""Tiny random 2:4 models of many families, and what is compared of checkpoint folders: bytes of files, tensors, logits."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from hf_sparse24 import Sparse24Config, Sparse24Linear

IDS = torch.tensor([[1, 5, 9, 33, 77, 2, 8]])
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
ENCODER_SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
KEPT, DENSE = Sparse24Config(run_compressed=True), Sparse24Config(run_compressed=False)


@dataclass(frozen=True)
class Family:
    """One architecture: how to build it, and what of it is packed under `Sparse24Config()`."""

    model_class: type[PreTrainedModel]
    config: Callable[[], Any]
    num_packed: int
    """Layers that are Sparse24Linear when kept."""
    num_packed_experts: int = 0
    """Weights of experts that are stored packed, and are parts of `Sparse24Experts` when kept."""
    dense: frozenset[str] = frozenset({"lm_head"})
    """Every other nn.Linear of the model."""
    inputs: dict[str, Tensor] = field(default_factory=lambda: {"input_ids": IDS})

    def build(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """A random model whose Linear weights are 2:4, lm_head included unless it is tied."""
        config = self.config()
        config.dtype = dtype
        torch.manual_seed(0)
        # `.to(dtype)` would cast rotary buffers as well, which a reload keeps in float32.
        model = self.model_class._from_config(config, dtype=dtype).eval()
        return make_2_4(model)


def make_2_4(model: nn.Module, skip: Iterable[str] = ()) -> Any:
    """Keep the two largest of every group of four in each Linear and each stacked expert weight; zeros are +0.0."""
    declared = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {*declared, *declared.values()}
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stacked = parameter.ndim == 3 and "experts" in name
            if (name in linear or stacked) and name not in tied and name.removesuffix(".weight") not in set(skip):
                parameter.copy_(two_of_four(parameter))
    return model


def two_of_four(weight: Tensor) -> Tensor:
    """The weight with the two smallest magnitudes of every group of four set to +0.0."""
    groups = weight.detach().unflatten(-1, (-1, 4))
    kept = torch.zeros_like(groups).scatter(-1, groups.float().abs().topk(2).indices, 1).bool()
    return torch.where(kept, groups, torch.zeros_like(groups)).flatten(-2)


def packed_layer(out_features: int = 40, in_features: int = 32, *, dtype: torch.dtype | None = None, bias: bool = True) -> Sparse24Linear:
    """A random 2:4 layer."""
    linear = nn.Linear(in_features, out_features, bias=bias, dtype=dtype)
    linear.weight.data = two_of_four(linear.weight)
    layer = Sparse24Linear.from_linear(linear)
    assert isinstance(layer, Sparse24Linear)
    return layer


def _llava() -> LlavaConfig:
    vision = CLIPVisionConfig(**ENCODER_SIZES, image_size=16, patch_size=8)
    return LlavaConfig(vision_config=vision, text_config=LlamaConfig(**{**SIZES, "vocab_size": 100}), image_token_index=98)


def _pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)}


NOTHING: frozenset[str] = frozenset()
FAMILIES: dict[str, Family] = {
    "llama": Family(LlamaForCausalLM, lambda: LlamaConfig(**SIZES), 14),
    "llama-tied": Family(LlamaForCausalLM, lambda: LlamaConfig(**SIZES, tie_word_embeddings=True), 14),
    "qwen2": Family(Qwen2ForCausalLM, lambda: Qwen2Config(**SIZES, tie_word_embeddings=True), 14),
    "opt": Family(
        OPTForCausalLM,
        lambda: OPTConfig(
            vocab_size=96,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=32,
        ),
        12,
    ),
    "bert": Family(BertForSequenceClassification, lambda: BertConfig(**ENCODER_SIZES, vocab_size=96, num_labels=4), 14, dense=NOTHING),
    "bert-mlm": Family(
        BertForMaskedLM, lambda: BertConfig(**ENCODER_SIZES, vocab_size=96), 13, dense=frozenset({"cls.predictions.decoder"})
    ),
    "t5": Family(
        T5ForConditionalGeneration,
        lambda: T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4),
        32,
        inputs={"input_ids": IDS, "decoder_input_ids": IDS},
    ),
    "mixtral": Family(MixtralForCausalLM, lambda: MixtralConfig(**SIZES, num_local_experts=4), 8, 24),
    "qwen3-moe": Family(
        Qwen3MoeForCausalLM, lambda: Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2), 8, 24
    ),
    "vit": Family(
        *(ViTForImageClassification, lambda: ViTConfig(**ENCODER_SIZES, image_size=16, patch_size=4), 13), dense=NOTHING, inputs=_pixels()
    ),
    "llava": Family(LlavaForConditionalGeneration, _llava, 28),
}


def llama(dtype: torch.dtype = torch.float32, **overrides: Any) -> LlamaForCausalLM:
    """A random 2:4 Llama of two layers."""
    return Family(LlamaForCausalLM, lambda: LlamaConfig(**{**SIZES, **overrides}), 14).build(dtype)


def load_kept(folder: Path | str, model_class: Any = AutoModelForCausalLM, **kwargs: Any) -> Any:
    """`from_pretrained` with layers kept packed."""
    return model_class.from_pretrained(folder, quantization_config=KEPT, **kwargs)


def load_dense(folder: Path | str, model_class: Any = AutoModelForCausalLM, **kwargs: Any) -> Any:
    """`from_pretrained` to plain nn.Linear."""
    return model_class.from_pretrained(folder, quantization_config=DENSE, **kwargs)


@torch.no_grad()
def logits(model: Any, **inputs: Tensor) -> Tensor:
    """Logits for `inputs`, for IDS if there are none."""
    return model(**(inputs or {"input_ids": IDS})).logits


def packed_names(model: nn.Module) -> set[str]:
    """Names of the 2:4 layers."""
    return {name for name, module in model.named_modules() if isinstance(module, Sparse24Linear)}


def dense_names(model: nn.Module) -> set[str]:
    """Names of the plain nn.Linear layers."""
    return {name for name, module in model.named_modules() if type(module) is nn.Linear}


def files_of(folder: Path | str) -> dict[str, bytes]:
    """Every file of a folder, hidden ones and subfolders included."""
    folder = Path(folder)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def tensors_of(folder: Path | str) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files."""
    return {name: tensor for file in sorted(Path(folder).glob("*.safetensors")) for name, tensor in load_file(file).items()}


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and memory are equal; NaN and the sign of zero count."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def state_bytes(model: nn.Module) -> dict[str, bytes]:
    """The memory of every tensor of a model."""
    return {name: value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() for name, value in model.state_dict().items()}
