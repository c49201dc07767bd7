"""Compiles variants of kernels for sm_90a without a GPU, under the Triton on its path, as long as it is asked to.

    python -m tests.compile_server

A question is a line `["tests.ops.moe.compiling", "planned"]`: a module with `report(name)`, and a name. The answer is a
line of JSON, what `report` returned or what it raised: `{"report": ...}` or `{"error": "Traceback ..."}`.
"""

import contextlib
import importlib
import json
import sys
import traceback


def answer(module: str, name: str) -> dict:
    """What is to be said of one variant."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return {"report": importlib.import_module(module).report(name)}
    except Exception:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    for question in sys.stdin:
        print(json.dumps(answer(*json.loads(question))), flush=True)
