"""Distillation: a pruned model learns, with its masks kept, to predict what the dense model predicts.

One-shot pruning costs small models much; this is meant to give some of it back, on text like the one it sees.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from hf_sparse24.pruning.blocks import evaluating, run_model
from hf_sparse24.pruning.calibration import WINDOW, Batch, make_batches
from hf_sparse24.pruning.masks import keep_masks

BETAS, CLIP, LAST_RATE = (0.9, 0.95), 1.0, 0.02
TOKENS_AT_ONCE = 512


@dataclass
class DistillReport:
    """How long it took, and the loss of every step."""

    steps: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def distill(
    model: Any,
    teacher: Any,
    data: Any,
    *,
    tokenizer: Any = None,
    minutes: float | None = None,
    steps: int | None = None,
    learning_rate: float = 4e-4,
    warmup: int = 50,
    batch_size: int = 32,
    micro_batch_size: int = 8,
    window: int = WINDOW,
    weight_decay: float = 0.0,
    seed: int = 0,
) -> DistillReport:
    """Train a pruned model to give the dense model's outputs; its masks stay.

    Args:
        model: Pruned, in place.  It is trained in float32, in bfloat16 products on a GPU, and gets its dtype back.
        teacher: The dense model, on the same device.
        data: As calibration in `prune`; all of it is used.
        tokenizer: For texts.
        minutes: Stop after so long.
        steps: Stop after so many.  One of both is needed; with steps alone the result depends on nothing but the seed.
        learning_rate: Of AdamW, at its highest; it falls along a cosine to a fiftieth.
        warmup: Steps in which it rises.
        batch_size: Windows in a step.
        micro_batch_size: Windows that run together.
        window: Tokens in a window of texts.
        weight_decay: Of AdamW.
        seed: Of the order of windows.

    Returns:
        Steps, seconds and losses: the mean over tokens of the divergence (KL) of the predictions, for models without logits of
        the squared distance of the last hidden states over the teacher's squared length.

    Raises:
        ValueError: Neither minutes nor steps, or a model without masks.
    """
    if not (minutes or steps):
        raise ValueError("distill needs minutes or steps")
    batches = make_batches(data, model, tokenizer, num_windows=1 << 40, window=window, batch_size=micro_batch_size, seed=seed)
    report, started = DistillReport(), time.perf_counter()
    with _in_float32(model), keep_masks(model), evaluating(model), evaluating(teacher), logging.tqdm(total=steps, desc="Distilling") as bar:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=BETAS, weight_decay=weight_decay)
        for parts in _draws(batches, max(1, batch_size // micro_batch_size), seed):
            progress = max(report.steps / steps if steps else 0.0, report.seconds / (60 * minutes) if minutes else 0.0)
            if progress >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * min(1.0, (report.steps + 1) / warmup if warmup else 1.0) * _cosine(progress)
            report.losses.append(_step(model, teacher, optimizer, parts))
            report.steps += 1
            report.seconds = round(time.perf_counter() - started, 3)
            bar.update()
    return report


@torch.no_grad()
def sample_windows(
    model: Any, num_windows: int, window: int = WINDOW, *, start: int | None = None, batch_size: int = 32, seed: int = 0
) -> Tensor:
    """Let a causal model write: text to distill on where there is none, or none of the right kinds.

    Args:
        model: Dense.
        num_windows: How many.
        window: Tokens in each.
        start: The first token; the model's own (bos) by default.
        batch_size: Windows that are written together.
        seed: Of what is drawn.

    Returns:
        (num_windows, window), int64, on the CPU.

    Raises:
        ValueError: The model has no token to start with.
    """
    first = model.config.bos_token_id if start is None else start
    if first is None:
        raise ValueError("the model has no bos_token_id to start with: give start=")
    written = []
    with evaluating(model), torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(seed)
        for size in [batch_size] * (num_windows // batch_size) + [num_windows % batch_size] * bool(num_windows % batch_size):
            ids = torch.full((size, 1), first, device=model.device)
            # top_k=0: from the whole distribution; and no end before the window is full.
            options = {
                "do_sample": True,
                "top_k": 0,
                "top_p": 1.0,
                "temperature": 1.0,
                "min_new_tokens": window - 1,
                "max_new_tokens": window - 1,
            }
            written.append(model.generate(ids, attention_mask=torch.ones_like(ids), **options).cpu())
    return torch.cat(written)


def _draws(batches: Sequence[Batch], count: int, seed: int) -> Iterator[list[Batch]]:
    """`count` batches at a time, all of them in a new random order again and again."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while True:
        while len(order) < count:
            order += torch.randperm(len(batches), generator=generator).tolist()
        yield [batches[index] for index in order[:count]]
        order = order[count:]


def _step(model: Any, teacher: Any, optimizer: torch.optim.Optimizer, parts: Sequence[Batch]) -> float:
    total = 0.0
    for batch in parts:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
            with torch.no_grad():
                expected = run_model(teacher, batch)
            loss = _distance(run_model(model, batch), expected, batch.get("attention_mask")) / len(parts)
        loss.backward()
        total += loss.item()
    nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def _distance(found: Any, expected: Any, mask: Tensor | None) -> Tensor:
    """The mean over tokens that count."""
    if hasattr(found, "logits"):
        student, dense = found.logits.flatten(0, -2), expected.logits.to(found.logits.device).flatten(0, -2)
        by_token = _Divergence.apply(student, dense)
    else:
        student, dense = (output.last_hidden_state.float().flatten(0, -2) for output in (found, expected))
        by_token = (student - dense).square().sum(-1) / dense.square().sum(-1)
    if mask is not None and mask.numel() == len(by_token):
        counted = mask.flatten().to(by_token)
        return (by_token * counted).sum() / counted.sum()
    return by_token.mean()


class _Divergence(torch.autograd.Function):
    """KL(dense || student) of each token's predictions, (tokens,), float32, from two (tokens, vocabulary) logits.

    The gradient, the difference of the two distributions, is found on the way: some tokens at a time, so that the only thing as
    large as the logits is that gradient.
    """

    @staticmethod
    def forward(ctx: Any, student: Tensor, dense: Tensor) -> Tensor:
        losses, difference = student.new_empty(len(student), dtype=torch.float32), torch.empty_like(student)
        for start in range(0, len(student), TOKENS_AT_ONCE):
            part = slice(start, start + TOKENS_AT_ONCE)
            own, other = (logits[part].float().log_softmax(-1) for logits in (student, dense))
            expected = other.exp()
            losses[part] = (other.sub_(own).mul_(expected)).sum(-1)
            difference[part] = own.exp_().sub_(expected)
        ctx.save_for_backward(difference)
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (difference,) = ctx.saved_tensors
        return difference * grad[:, None].to(difference.dtype), None


def _cosine(progress: float) -> float:
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Parameters only: rotary buffers stay as they are.  Afterwards each has its dtype again, and no gradient."""
    dtypes = [(parameter, parameter.dtype) for parameter in model.parameters()]
    try:
        for parameter, _ in dtypes:
            parameter.data = parameter.data.float()
        yield
    finally:
        model.zero_grad(set_to_none=True)
        for parameter, dtype in dtypes:
            parameter.data = parameter.data.to(dtype)
