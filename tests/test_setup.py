"""scripts/setup.sh names what is missing, with the remedy, before it has changed anything."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A python3 that answers the script's two questions: is it new enough, can it make environments.
FAKE_PYTHON = """#!/bin/sh
case "$*" in
    *version_info*) exit {too_old} ;;
    *ensurepip*) exit {no_venv} ;;
    --version) echo "Python 3.9.2" ;;
    *) echo "unexpected call: $*" >&2; exit 9 ;;
esac
"""


def run_setup(folder, too_old, no_venv):
    """Run a copy of the script where `python3` is a fake."""
    (folder / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", folder / "scripts")
    fake = folder / "bin" / "python3"
    fake.parent.mkdir()
    fake.write_text(FAKE_PYTHON.format(too_old=int(too_old), no_venv=int(no_venv)))
    fake.chmod(0o755)
    return subprocess.run(
        ["bash", "scripts/setup.sh", "run"],
        cwd=folder,
        env={"PATH": f"{fake.parent}:/usr/bin:/bin", "PYTHON": "python3"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
class TestSetup:
    def test_missing_venv_is_named_with_its_remedy(self, tmp_path):
        ran = run_setup(tmp_path, too_old=False, no_venv=True)
        assert ran.returncode == 1
        assert "apt install python3-venv" in ran.stderr
        assert not (tmp_path / ".venv").exists()

    def test_too_old_a_python_is_named_with_its_remedy(self, tmp_path):
        ran = run_setup(tmp_path, too_old=True, no_venv=False)
        assert ran.returncode == 1
        assert "Python 3.11 or newer is needed, found: Python 3.9.2" in ran.stderr
        assert "make run PYTHON=" in ran.stderr
        assert not (tmp_path / ".venv").exists()

    def test_ci_names_a_missing_make(self, tmp_path):
        shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
        tools = tmp_path / "bin"
        tools.mkdir()
        for tool in ("bash", "dirname"):
            (tools / tool).symlink_to(shutil.which(tool))
        ran = subprocess.run(
            ["bash", str(tmp_path / ".ci" / "run")],
            env={"PATH": str(tools)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == 1
        assert "apt install make" in ran.stderr
