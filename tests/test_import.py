"""`import hf_sparse24` registers with Transformers and does nothing else; every check has a process of its own."""

import os
import subprocess
import sys
import textwrap

import pytest

# Reports what is done while it watches, as (event, arguments), through CPython's audit events.
WATCH = """
import os, sys

events, watching = [], False
TOUCHING = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.link", "os.truncate", "os.putenv", "os.unsetenv")
REACHING = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn")

def watch(event, arguments):
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if watching and (writes or event in TOUCHING + REACHING):
        events.append((event, arguments))

sys.addaudithook(watch)
"""
HOOKED = """
from transformers import PreTrainedModel, modeling_utils
method, function = PreTrainedModel.save_pretrained, modeling_utils.get_hf_quantizer
"""


def run(script: str, **environment: str) -> str:
    # -B: Python itself writes no bytecode.
    command = [sys.executable, "-B", "-c", textwrap.dedent(script)]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def test_import_writes_nothing_and_reaches_nobody():
    run(
        WATCH
        + """
import torch, transformers.modeling_utils  # what these do is theirs
watching = True
import hf_sparse24
watching = False
assert events == [], events
"""
    )


def test_import_leaves_the_environment_alone():
    run("""
        import os, torch, transformers.modeling_utils
        before = dict(os.environ)
        import hf_sparse24
        assert dict(os.environ) == before
    """)


def test_import_asks_no_gpu():
    run("""
        import traceback
        import torch

        asked = []
        def recorder(name):
            def record(*args, **kwargs):
                asked.append((name, traceback.format_stack(limit=4)))
                return original(*args, **kwargs)
            original = getattr(torch.cuda, name)
            return record
        import transformers.modeling_utils
        queries = ["is_available", "device_count", "current_device", "get_device_capability", "get_device_properties"]
        for name in ["init", "_lazy_init", *queries]:
            setattr(torch.cuda, name, recorder(name))
        import hf_sparse24
        assert asked == [], asked
        assert not torch.cuda.is_initialized()
    """)


@pytest.mark.parametrize("first", ["hf_sparse24", "transformers"])
def test_hooks_are_in_place_in_either_order_of_import(first):
    run(f"import {first}; import hf_sparse24" + HOOKED + "assert method._sparse24_original and function._sparse24_original")


def test_importing_again_wraps_nothing_twice():
    again = """
import importlib, hf_sparse24
importlib.reload(hf_sparse24)
assert PreTrainedModel.save_pretrained is method and modeling_utils.get_hf_quantizer is function
assert not hasattr(method._sparse24_original, "_sparse24_original")
"""
    run("import sys, hf_sparse24" + HOOKED + again)


def test_opting_out_leaves_save_pretrained_alone():
    script = """
        from transformers import PreTrainedModel
        before = PreTrainedModel.save_pretrained, PreTrainedModel.push_to_hub
        import hf_sparse24
        assert (PreTrainedModel.save_pretrained, PreTrainedModel.push_to_hub) == before
    """
    run(script, HF_SPARSE24_NO_PATCH="1")
