"""`hf-sparse24 prune` and `hf-sparse24 eval`."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# torch and Transformers are imported where they are used.


def add_commands(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Declare both.

    Args:
        add: Takes name, function and text of a command, and gives its parser.
    """
    prune = add("prune", _prune, "make a model 2:4 and save it compressed")
    prune.add_argument("model", help="dense checkpoint folder, or repository on the Hub")
    prune.add_argument("out", type=Path, help="new or empty folder")
    prune.add_argument("--calibration", type=Path, help="text file, paragraphs divided by empty lines; needed by all methods but magnitude")
    prune.add_argument("--method", help="magnitude, wanda, ria, sparsegpt, obs or alps (default: alps)")
    prune.add_argument("--refine", choices=("cg",), help="improve the weights that stay by conjugate gradient")
    prune.add_argument("--pattern", default="2:4", help="N:M, or a ratio of zeros such as 0.5 (default: %(default)s)")
    prune.add_argument("--targets", nargs="+", default=["Linear"], help='class names, module names or "re:PATTERN" (default: Linear)')
    prune.add_argument("--ignore", nargs="*", default=["lm_head"], help="modules that are never touched (default: lm_head)")
    prune.add_argument("--damp", type=float, default=0.01, help="share of the mean diagonal that is added to it (default: %(default)s)")
    prune.add_argument("--true-sequential", action="store_true", help="inside a block too, take inputs after those before are pruned")
    prune.add_argument("--distill-minutes", type=float, help="afterwards learn from the dense model for so long, with the mask kept")
    prune.add_argument("--report", type=Path, help="where to write the report: FILE.json, FILE.svg or FILE.txt")
    _add_data_options(prune)

    evaluate = add("eval", _eval, "perplexity of a causal model, or agreement of an encoder with the dense one")
    evaluate.add_argument("model", help="checkpoint folder, or repository on the Hub")
    evaluate.add_argument("--text", type=Path, required=True, help="text file, paragraphs divided by empty lines")
    evaluate.add_argument("--against", help="the dense model; for a causal one its perplexity is printed as well")
    _add_data_options(evaluate)


def _add_data_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--windows", type=int, default=128, help="windows of text, or texts of an encoder, drawn at random (default: %(default)s)"
    )
    parser.add_argument("--window", type=int, default=1024, help="tokens in a window (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)s)")
    parser.add_argument("--device", help="such as cuda; prune moves one block at a time there (default: the CPU)")


def _prune(arguments: argparse.Namespace) -> int:
    from hf_sparse24.journal import open_journal, require_new

    if arguments.calibration is None and (arguments.method != "magnitude" or arguments.distill_minutes):
        raise ValueError("give --calibration FILE, or --method magnitude, which looks at no data and is by far the worst")
    if arguments.report and arguments.report.suffix not in (".json", ".svg", ".txt"):
        raise ValueError(f"--report must end in .json, .svg or .txt, got {arguments.report}")
    require_new(arguments.out)
    model, tokenizer = _open(arguments.model)
    with open_journal(arguments.out, _task(arguments, model)) as journal:
        report, result = _prune_into(journal, arguments, model, tokenizer)
        journal.publish()
    if arguments.report:
        render = {".json": report.to_json, ".svg": report.to_svg, ".txt": report.__str__}[arguments.report.suffix]
        arguments.report.write_text(render())
    print(json.dumps(result, indent=1) if arguments.json else _summary(report, result))
    return 0


def _task(arguments: argparse.Namespace, model: Any) -> dict[str, Any]:
    """What decides the pruned weights."""
    import hashlib

    import torch

    from hf_sparse24 import __version__
    from hf_sparse24.journal import fingerprint

    source, text = Path(arguments.model), arguments.calibration
    ignored = {"run", "command", "json", "out", "report", "model", "calibration"}
    return {
        **{name: value for name, value in vars(arguments).items() if name not in ignored},
        "model": fingerprint(source) if source.is_dir() else [arguments.model, model.config._commit_hash],
        "calibration": None if text is None or not text.is_file() else hashlib.sha256(text.read_bytes()).hexdigest(),
        "versions": [__version__, torch.__version__],
    }


def _prune_into(journal: Any, arguments: argparse.Namespace, model: Any, tokenizer: Any) -> tuple[Any, dict[str, Any]]:
    """Prune and save into the journal's stage."""
    from hf_sparse24 import Sparse24Config, SparseBitmaskConfig, distill, prune
    from hf_sparse24.report import PRUNE_REPORT

    data = {"tokenizer": tokenizer, "window": arguments.window, "seed": arguments.seed}
    report = prune(
        model,
        arguments.calibration,
        arguments.method,
        refine=arguments.refine,
        targets=arguments.targets,
        ignore=arguments.ignore,
        pattern=arguments.pattern,
        damp=arguments.damp,
        true_sequential=arguments.true_sequential,
        num_windows=arguments.windows,
        device=arguments.device,
        journal=journal,
        **data,
    )
    result: dict[str, Any] = {"out": str(arguments.out), **report.to_dict()}
    if arguments.distill_minutes:
        teacher, _ = _open(arguments.model)
        device = arguments.device or "cpu"
        learnt = distill(model.to(device), teacher.to(device), arguments.calibration, minutes=arguments.distill_minutes, **data)
        model.to("cpu")
        result["distillation"] = learnt.to_dict()
    packed = Sparse24Config if report.pattern == "2:4" else SparseBitmaskConfig
    config = packed(targets=arguments.targets, ignore=[*arguments.ignore, *report.left_dense])
    model.save_pretrained(journal.stage, sparsity_config=config)
    tokenizer.save_pretrained(journal.stage)
    (journal.stage / PRUNE_REPORT).write_text(report.to_json())
    return report, result


def _summary(report: Any, result: dict[str, Any]) -> str:
    lines = [str(report)]
    if learnt := result.get("distillation"):
        lines.append(f"distilled for {learnt['steps']} steps: loss {learnt['losses'][0]:.3f} -> {learnt['losses'][-1]:.3f}")
    return "\n".join([*lines, f"saved: {result['out']}"])


def _eval(arguments: argparse.Namespace) -> int:
    import torch

    from hf_sparse24.pruning import agreement, embed, make_batches, perplexity
    from hf_sparse24.pruning.calibration import is_causal

    model, tokenizer = _open(arguments.model, arguments.device)
    options = {"num_windows": arguments.windows, "window": arguments.window, "seed": arguments.seed}
    batches = make_batches(arguments.text, model, tokenizer, **options)
    dense = None if arguments.against is None else _open(arguments.against, arguments.device)[0]
    result: dict[str, Any]
    if is_causal(model):
        windows = torch.cat([batch["input_ids"] for batch in batches])
        result = {"windows": len(windows), "tokens": windows.numel(), "perplexity": perplexity(model, windows)}
        if dense is not None:
            result["dense_perplexity"] = perplexity(dense, windows)
    elif dense is None:
        raise ValueError("an encoder is compared with the dense model: give --against MODEL")
    else:
        result = {"texts": sum(len(batch["input_ids"]) for batch in batches)}
        result |= agreement(embed(dense, batches), embed(model, batches)).to_dict()
    print(json.dumps(result, indent=1) if arguments.json else "\n".join(f"{name}: {_show(value)}" for name, value in result.items()))
    return 0


def _show(value: float) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _open(source: str, device: str | None = None) -> tuple[Any, Any]:
    """A model of the class that its config names, and its tokenizer."""
    import transformers
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(source)
    named = (config.architectures or ["AutoModel"])[0]
    model_class = getattr(transformers, named, None)
    if model_class is None:
        raise ValueError(f"{source}: Transformers has no class {named}; load the model yourself, and call hf_sparse24.prune")
    print(f"opening {source} as {named}", file=sys.stderr)
    model = model_class.from_pretrained(source, dtype="auto")
    return model.to(device or "cpu"), AutoTokenizer.from_pretrained(source)
