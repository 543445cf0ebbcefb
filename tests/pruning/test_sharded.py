"""Masks under FSDP2, in two processes on a CPU."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import torch

SCRIPT = """
    import sys, torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from hf_sparse24 import keep_masks, prune
    from hf_sparse24.pruning import stored_masks
    from tests.pruning.test_one_shot import IDS, build

    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = build()
    prune(model)
    masks = stored_masks(model)
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    with keep_masks(model):
        for step in range(3):
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
            moments = {name: optimizer.state[model.get_parameter(name)]["exp_avg"].full_tensor() for name in masks}
            optimizer.zero_grad()
    for name, mask in masks.items():
        weight = model.get_parameter(name)
        assert isinstance(weight, DTensor)
        assert not weight.full_tensor()[~mask].any() and not moments[name][~mask].any(), name
        assert moments[name][mask].any()
    if rank == 0:
        torch.save({name: model.get_parameter(name).full_tensor() for name in masks}, f"{store}.weights")
    else:
        [model.get_parameter(name).full_tensor() for name in masks]
    dist.barrier()
    dist.destroy_process_group()
"""


def test_sharded_weights_keep_their_masks_and_learn_as_whole_ones(tmp_path):
    from hf_sparse24 import keep_masks, prune
    from tests.pruning.test_one_shot import IDS, build

    command = [sys.executable, "-c", textwrap.dedent(SCRIPT)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path / "store")], env=environment, stderr=subprocess.PIPE) for rank in (0, 1)]
    errors = [process.communicate(timeout=240)[1].decode() for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors[0][-2000:] + errors[1][-2000:]
    model = build()
    prune(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    with keep_masks(model):
        for _ in range(3):
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, weight in torch.load(tmp_path / "store.weights").items():
        torch.testing.assert_close(weight, model.get_parameter(name).detach(), rtol=1e-3, atol=1e-4)
