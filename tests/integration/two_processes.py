"""What two processes do with one model, on a CPU: `python -m tests.integration.two_processes RANK WORK PORT`.

Each function below is run by both; its name is the test's.  What goes wrong in one is told to the other process by nobody, so that a
function has to fail in both or in none.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from hf_sparse24 import ModelCompressor, Sparse24Config, Sparse24Linear, keep_masks
from hf_sparse24.kernels import ops
from hf_sparse24.modules import packed_layers
from hf_sparse24.pattern import find_bad_groups
from hf_sparse24.quantized_linear import Marlin24Linear, QuantizedSparse24Linear
from tests.models import DENSE, IDS, KEPT, files_of

TP, FSDP = DistributedConfig(tp_size=2), DistributedConfig(fsdp_size=2)
WORK = Path()
DOWN, UP = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj"


def load(name: str, how: Any = KEPT, parallel: Any = None, **kwargs: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(WORK / name, quantization_config=how, distributed_config=parallel, **kwargs)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def require_same_logits(model: Any, name: str) -> None:
    alone = load(name)
    expected = logits(alone)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=2e-3 * expected.abs().max().item() if "w" in name else 1e-6)
    # With gradients, Transformers takes another path.
    torch.testing.assert_close(model(input_ids=IDS).logits.detach(), expected, rtol=0, atol=2e-3 if "w" in name else 1e-6)


def require_same_files(model: Any, name: str, **saving: Any) -> None:
    """Save from both processes; the files must be those of the folder."""
    out = WORK / f"{name} saved by {sys._getframe(1).f_code.co_name}"
    model.save_pretrained(out, max_shard_size="60KB", **saving)
    dist.barrier()
    found, expected = files_of(out), files_of(WORK / name)
    assert found.keys() == expected.keys(), (sorted(found), sorted(expected))
    assert [file for file in expected if found[file] != expected[file]] == []


def pieces(layer: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of what this process holds."""
    parameters = {name: value for name, value in layer._parameters.items() if value is not None}
    return {name: tuple((value.to_local() if isinstance(value, DTensor) else value).shape) for name, value in parameters.items()}


def requires(message: str) -> Any:
    return pytest.raises(ValueError, match=message)


# ---- tensor parallelism ------------------------------------------------------------------------------------------------------


def tensor_parallel_layers_hold_their_pieces() -> None:
    model = load("llama", parallel=TP)
    up, down = model.get_submodule(UP), model.get_submodule(DOWN)
    assert type(up) is type(down) is Sparse24Linear and len(packed_layers(model)) == 14
    assert pieces(up) == {"compressed": (32, 16), "bitmask": (32, 4)} and up.local_shape == (32, 32)
    assert pieces(down) == {"compressed": (32, 16), "bitmask": (32, 4)} and down.local_shape == (32, 32)
    whole = load("llama")
    start = 32 * dist.get_rank()
    assert torch.equal(up.compressed.to_local(), whole.get_submodule(UP).compressed[start : start + 32])
    assert torch.equal(down.compressed.to_local(), whole.get_submodule(DOWN).compressed[:, start // 2 : start // 2 + 16])
    assert model.num_parameters() == whole.num_parameters()
    # A kernel is told the size of the piece, not that of the layer.
    told, original = [], ops.linear_inference

    def linear(x: torch.Tensor, compressed: torch.Tensor, *rest: Any) -> torch.Tensor:
        told.append(x.shape[-1] == 2 * compressed.shape[1] == rest[-1])
        return original(x, compressed, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "linear_inference", linear)
        logits(model)
    assert len(told) == 14 and all(told)


def tensor_parallel_logits_and_files_are_those_of_one_process() -> None:
    for name in ("llama", "qwen2"):  # the second has biases and tied embeddings
        model = load(name, parallel=TP)
        require_same_logits(model, name)
        require_same_files(model, name)


def tensor_parallel_rows_may_have_biases() -> None:
    model = load("llama-biases", parallel=TP)
    assert pieces(model.get_submodule(DOWN))["bias"] == (32,) and pieces(model.get_submodule(UP))["bias"] == (32,)
    require_same_logits(model, "llama-biases")
    require_same_files(model, "llama-biases")


def tensor_parallel_saves_with_our_keyword_too() -> None:
    require_same_files(load("llama", parallel=TP), "llama", sparsity_config=Sparse24Config())
    require_same_files(load("llama", DENSE, TP), "llama", sparsity_config=Sparse24Config())
    require_same_files(load("qwen2", DENSE, TP), "qwen2", sparsity_config=Sparse24Config())


def tensor_parallel_save_that_fails_fails_in_both() -> None:
    model = load("llama", DENSE, TP)
    with torch.no_grad():
        model.get_submodule(UP).weight.add_(1)
    with requires("up_proj: not 2:4" if dist.get_rank() == 0 else "the first process could not save the model"):
        model.save_pretrained(WORK / "never", sparsity_config=Sparse24Config())
    assert not (WORK / "never").exists()


def tensor_parallel_dense_loads_cut_packed_weights() -> None:
    for name in ("llama", "mixtral"):
        require_same_logits(load(name, DENSE, TP), name)


def tensor_parallel_8_bit_layers_cut_their_scales() -> None:
    for name in ("w-fp8", "w-int8", "w-fp8-tensor"):
        model = load(name, parallel=TP)
        up, down = model.get_submodule(UP), model.get_submodule(DOWN)
        assert type(up) is type(down) is QuantizedSparse24Linear
        per_row = name != "w-fp8-tensor"
        assert pieces(up)["weight_scale"][0] == (256 if per_row else 1)
        assert pieces(down)["weight_scale"][0] == (256 if per_row else 1)
        assert pieces(down)["compressed"] == (256, 128)
        require_same_logits(model, name)
        require_same_files(model, name)


def tensor_parallel_marlin_layers_are_cut_in_their_order() -> None:
    for name in ("w4a16", "w8a16", "w4a16-rows"):
        model = load(name, parallel=TP)
        up, down = model.get_submodule(UP), model.get_submodule(DOWN)
        assert type(up) is type(down) is Marlin24Linear
        assert pieces(up)["meta"] == (8, 512) and up.local_shape == (256, 256)
        assert pieces(down)["meta"] == (8, 512) and down.local_shape == (256, 256)
        assert pieces(down)["scale_packed"] == ((2, 256) if name == "w4a16" else (1, 256))
        require_same_logits(model, name)
        require_same_files(model, name)


def tensor_parallel_cuts_through_a_byte_are_refused() -> None:
    message = r"down_proj: 72 columns cannot be cut into 2 pieces: sparse-24-bitmask can be cut at multiples of 8, and 72 / 2 is 36"
    with requires(message):
        load("llama-72", parallel=TP)
    # Dense layers can be cut there.
    require_same_logits(load("llama-72", DENSE, TP), "llama-72")


def tensor_parallel_cuts_through_a_group_of_scales_are_refused() -> None:
    with requires(r"k_proj: 64 rows cannot be cut into 2 pieces: marlin-24 can be cut at multiples of 64, and 64 / 2 is 32"):
        load("w4a16-narrow", parallel=TP)


def tensor_parallel_formats_without_pieces_are_refused() -> None:
    with requires("q_proj: a weight stored as sparse-bitmask cannot be cut for tensor parallelism; load with .*run_compressed=False"):
        load("bitmask", parallel=TP)
    require_same_logits(load("bitmask", DENSE, TP), "bitmask")


def tensor_parallel_styles_that_are_not_known_are_refused() -> None:
    plan = {"model.layers.*.mlp.up_proj": "packed_colwise"}
    with requires("up_proj: packed layers do not know the tensor-parallel style 'packed_colwise'"):
        load("llama", parallel=DistributedConfig(tp_size=2, tp_plan=plan))


def a_dense_checkpoint_is_not_packed_in_pieces() -> None:
    for parallel in (TP, FSDP):
        message = "cannot be packed while they are sharded over several processes: run hf-sparse24 compress first"
        with requires(message):
            load("dense", Sparse24Config(), parallel)
        model = load("dense", None, parallel)
        for pack in (ModelCompressor(Sparse24Config()).compress, ModelCompressor(Sparse24Config()).compress_model):
            with requires(message):
                pack(model)


def pieces_are_not_taken_for_weights() -> None:
    model = load("llama", parallel=TP)
    layer = model.get_submodule(UP)
    assert layer.weight.shape == (64, 32)
    for unpack in (layer.to_linear, model.dequantize, lambda: layer.weight + 1):
        with requires("this layer is sharded over several processes"):
            unpack()
    assert layer.prepare() == "the weight is sharded over several processes"


def damaged_pieces_are_found_by_the_process_that_holds_them() -> None:
    # Row 40 of up_proj is of the second process.
    if dist.get_rank() == 1:
        with requires("packed layer model.layers.0.mlp.up_proj: .*row 8"):
            load("damaged", parallel=TP)
    else:
        load("damaged", parallel=TP)


def adapters_learn_on_pieces_what_they_learn_on_whole_layers() -> None:
    gradients = []
    for model in (load("llama", parallel=TP), load("llama")):
        embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
        model(inputs_embeds=embeddings, labels=IDS).loss.backward()
        gradients.append(embeddings.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-6)
    assert gradients[1].any()


# ---- FSDP2 -------------------------------------------------------------------------------------------------------------------


def fsdp_kept_layers_give_the_logits_and_files_of_one_process() -> None:
    for name in ("llama", "qwen2", "w-fp8", "w4a16", "bitmask"):
        model = load(name, parallel=FSDP)
        require_same_logits(model, name)
        require_same_files(model, name)
    require_same_files(load("llama", parallel=FSDP), "llama", sparsity_config=Sparse24Config())


def fsdp_fine_tuning_keeps_the_masks_of_a_model_that_was_loaded() -> None:
    model = load("dense", None, FSDP)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    before = model.get_submodule(UP).weight.full_tensor().clone()
    with keep_masks(model):
        losses = []
        for _ in range(4):
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    after = model.get_submodule(UP).weight.full_tensor()
    assert losses[-1] < losses[0] and not torch.equal(before, after)
    assert find_bad_groups(after) is None and not after[before == 0].any()
    model.save_pretrained(WORK / "tuned", sparsity_config=Sparse24Config())
    expected = logits(model)
    torch.testing.assert_close(logits(load("tuned")), expected, rtol=0, atol=1e-6)


def fsdp_adapters_learn_on_packed_layers() -> None:
    from peft import LoraConfig, get_peft_model

    results = []
    for shard in (True, False):
        torch.manual_seed(0)
        model = get_peft_model(load("llama"), LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False))
        if shard:
            mesh = init_device_mesh("cpu", (2,))
            for layer in model.base_model.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        optimizer = torch.optim.SGD(trained.values(), lr=1.0)
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        results.append({n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in trained.items()})
    for name, value in results[1].items():
        torch.testing.assert_close(results[0][name], value, rtol=1e-4, atol=1e-6)


def data_parallel_adapters_learn_on_packed_layers() -> None:
    from peft import LoraConfig, get_peft_model
    from torch.nn.parallel import DistributedDataParallel

    results = []
    for replicate in (True, False):
        torch.manual_seed(0)
        model = get_peft_model(load("llama"), LoraConfig(target_modules="all-linear", r=4, init_lora_weights=False))
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        run = DistributedDataParallel(model) if replicate else model
        run(input_ids=IDS, labels=IDS).loss.backward()
        results.append({name: parameter.grad for name, parameter in trained.items()})
    for name, value in results[1].items():
        torch.testing.assert_close(results[0][name], value, rtol=1e-4, atol=1e-6)


TESTS: dict[str, Callable[[], None]] = {
    name: function
    for name, function in list(globals().items())
    if name.split("_")[0] in ("tensor", "fsdp", "data", "a", "pieces", "damaged", "adapters") and callable(function) and name != "pieces"
}


def main() -> None:
    global WORK
    rank, port, only = int(sys.argv[1]), sys.argv[3], sys.argv[4:]
    WORK = Path(sys.argv[2])
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{WORK}/store", rank=rank, world_size=2)
    results = {}
    for name, test in TESTS.items():
        if only and name not in only:
            continue
        try:
            test()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
        dist.barrier()
        (WORK / f"results-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
