"""Calibration data: texts, a text file, a dataset or token batches become the batches that a model is run on.

Causal models get packed windows, all of one length, without padding.  Encoders get one text a row, padded; padding is never
counted.
"""

from collections.abc import Iterable, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NUM_WINDOWS, WINDOW, BATCH_SIZE = 128, 1024, 8
Batch = dict[str, Tensor]


def make_batches(
    calibration: Any,
    model: Any,
    tokenizer: Any = None,
    *,
    num_windows: int = NUM_WINDOWS,
    window: int = WINDOW,
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
) -> list[Batch]:
    """Turn what the user has into batches of `input_ids`, and `attention_mask` where there is padding.

    Args:
        calibration: A text file; texts; rows with a "text"; or token ids, as tensors (1-D or 2-D), lists of numbers, or mappings
            of tensors that the model takes as they are.
        model: Decides between packed windows and padded rows, and how long they may be.
        tokenizer: For texts.
        num_windows: At most so many windows of texts, or texts of an encoder; drawn at random where there are more.  Of token
            ids all are taken.
        window: Tokens in a window; the longest that a text of an encoder may be.
        batch_size: Windows in a batch.
        seed: Of the draw.

    Raises:
        ValueError: There is nothing to calibrate with, or texts come without a tokenizer.
    """
    rows = _rows(calibration)
    try:
        first = next(rows)
    except StopIteration:
        raise ValueError("calibration is empty") from None
    rows = chain([first], rows)
    if isinstance(first, Mapping) and "text" in first:
        rows, first = (row["text"] for row in rows), first["text"]
    if not isinstance(first, str):
        return _token_batches(rows, batch_size)
    if tokenizer is None:
        raise ValueError("calibration texts need a tokenizer: prune(model, texts, tokenizer=...), or give token batches")
    window = min(window, _longest(model))
    if model.config.is_encoder_decoder:
        raise ValueError("an encoder-decoder model is calibrated with token batches that have decoder_input_ids, not with texts")
    if is_causal(model):
        windows = pack_windows(rows, tokenizer, window, num_windows, seed)
        return [{"input_ids": part} for part in windows.split(batch_size)]
    return _padded(list(rows), tokenizer, window, num_windows, batch_size, seed)


def is_causal(model: Any) -> bool:
    """Whether the model predicts the next token."""
    return bool(model.can_generate())


def pack_windows(texts: Iterable[str], tokenizer: Any, window: int, num_windows: int, seed: int = 0) -> Tensor:
    """Join texts, the end token between them, and cut them into windows.

    Args:
        texts: Any number, of any length.
        tokenizer: Of the model.
        window: Tokens in a window; a single shorter one if there are not as many.
        num_windows: At most so many, drawn at random where there are more.
        seed: Of the draw.

    Returns:
        (windows, tokens), int64, in the order of the texts.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    # Truncation off and no warning about length: windows are cut here.
    ids = [id for text in texts for id in [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], *end]]
    if not ids:
        raise ValueError("the texts are empty")
    window = min(window, len(ids))
    windows = torch.tensor(ids[: len(ids) // window * window]).view(-1, window)
    return windows[_draw(len(windows), num_windows, seed)]


def token_mask(batch: Mapping[str, Tensor]) -> Tensor | None:
    """Which tokens count, (rows, tokens), bool; None if all do."""
    mask = batch.get("attention_mask")
    return None if mask is None or mask.ndim != 2 or bool(mask.all()) else mask.bool()


def _rows(calibration: Any) -> Any:
    if isinstance(calibration, (str, Path)):
        path = Path(calibration)
        if len(str(calibration)) > 4096 or not path.is_file():
            raise ValueError(f"calibration {str(calibration)[:80]!r} is not a file; give one text as [text]")
        return iter([text for text in path.read_text().split("\n\n") if text.strip()])
    if isinstance(calibration, Tensor):
        return iter([calibration])
    return iter([calibration] if isinstance(calibration, Mapping) else calibration)


def _token_batches(rows: Iterable[Any], batch_size: int) -> list[Batch]:
    batches: list[Batch] = []
    for row in rows:
        if isinstance(row, Mapping):
            batches.append({name: torch.as_tensor(value) for name, value in row.items() if name != "labels"})
            continue
        ids = torch.as_tensor(row)
        if ids.ndim not in (1, 2) or ids.is_floating_point():
            raise ValueError(f"token ids must be integers of one or two dimensions, got {ids.dtype} of shape {tuple(ids.shape)}")
        batches += [{"input_ids": part} for part in torch.atleast_2d(ids).split(batch_size)]
    return batches


def _padded(texts: list[str], tokenizer: Any, window: int, num_texts: int, batch_size: int, seed: int) -> list[Batch]:
    drawn = iter([texts[index] for index in _draw(len(texts), num_texts, seed)])
    batches = []
    while part := list(islice(drawn, batch_size)):
        batches.append(dict(tokenizer(part, padding=True, truncation=True, max_length=window, return_tensors="pt")))
    return batches


def _draw(available: int, wanted: int, seed: int) -> Tensor:
    """In ascending order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(available, generator=generator)[:wanted].sort().values


def _longest(model: Any) -> int:
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or WINDOW
