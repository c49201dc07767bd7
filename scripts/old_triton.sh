#!/usr/bin/env bash
# Installs the oldest supported Triton into the folder $1 (.../triton-VERSION), apart from the environment's own.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$1
version=${folder##*-}

rm -rf "$folder"
mkdir -p "$folder"
case "$(uname -s)-$(uname -m)" in
    Linux-x86_64 | Linux-aarch64)
        echo "setup: installing triton $version into $folder"
        .venv/bin/python -m pip install --disable-pip-version-check -qq --no-deps --target "$folder" "triton==$version"
        ;;
    *) echo "setup: Triton has no wheel for this platform; tests/lang/test_compile.py is skipped" ;;
esac
touch "$folder/.ready"
