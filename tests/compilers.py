"""Both Tritons that every kernel must compile with: the newest, which is installed, and the oldest supported.

A process can hold one Triton only, and starting one takes longer than compiling a variant. So each of the two is a
process that lives as long as the tests, tests/compile_server.py, and a test asks it for the one variant that it is of.
"""

import atexit
import functools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEWEST, OLDEST = "newest", "3.6.0"
SHARED_LIMIT = 227 * 1024

needs_triton = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"),
    reason=f"Triton has no wheel for {platform.system()} {platform.machine()}",
)


def variants(names: Iterable[str], oldest: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrizes a test by `triton` and `name`: all names with the newest Triton, those of `oldest` with the oldest.

    `oldest` is a choice with every schedule, mechanism and kind of operand in it; that a kernel has other tiles is
    nothing that one release of Triton has and another has not.
    """
    names, oldest = list(names), list(oldest)
    unknown = set(oldest) - set(names)
    assert not unknown, f"oldest: {unknown} are not among {names}"
    pairs = [(NEWEST, name) for name in names] + [(OLDEST, name) for name in oldest]
    return pytest.mark.parametrize(("triton", "name"), pairs)


def report(module: str, triton: str, name: str):
    """What `report(name)` of `module` says under that Triton."""
    server = _server(triton)
    server.stdin.write(json.dumps([module, name]) + "\n")
    server.stdin.flush()
    line = server.stdout.readline()
    assert line, f"the compiler's process ended with {server.wait()}"
    answer = json.loads(line)
    assert "report" in answer, answer["error"][-4000:]
    found = answer["report"]
    versions = {each["triton"] for each in (found if isinstance(found, list) else [found])}
    assert len(versions) == 1 and (triton == OLDEST) == (versions == {OLDEST}), versions
    return found


@functools.cache
def _server(triton: str) -> subprocess.Popen:
    paths = [*([_oldest()] if triton == OLDEST else []), str(ROOT / "src"), str(ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRITON_DEFAULT_FP_FUSION": "1"}
    command = [sys.executable, "-m", "tests.compile_server"]
    server = subprocess.Popen(command, env=env, cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(server.kill)
    return server


def _oldest() -> str:
    """Where the oldest supported Triton lies."""
    path = os.environ.get("TILEWEAVE_OLD_TRITON", str(ROOT / ".cache/triton-3.6.0"))
    assert Path(path, "triton").is_dir(), f"the oldest supported Triton is not in {path}: `make test` puts it there"
    return path
