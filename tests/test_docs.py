"""The documentation is true: links lead somewhere, Python blocks run, printed output is what the command prints.

A ```python block runs as a file of its own; of a ```python needs GPUs one, what it names must exist. A ```console
block holds lines `$ tileweave run ...` or `$ python FILE`, each followed by its output, in which numbers may differ.
"""

import ast
import importlib
import re
import runpy
import shlex
from pathlib import Path

import pytest

import tileweave
from tileweave.cli import main
from tileweave.explain import ROUTES
from tileweave.lang._names import HOST, WORDS

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]\d+)?")
# No measurement: the same everywhere.
PREDICTED = re.compile(r"tile [\dx]+, \d+ stages; the cost model says [\d.]+ us|\d+ tiles? of \d+ x \d+ on \d+ SMs")


def blocks(language):
    """Every ```language block: (page:line, text)."""
    for page in PAGES:
        text = page.read_text()
        for match in re.finditer(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text[: match.start()].count("\n") + 1
            yield pytest.param(match.group(1), id=f"{page.relative_to(ROOT)}:{line}")


def commands():
    """Every command of the console blocks: (command line, its output)."""
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block.values[0], flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield pytest.param(command, output, id=f"{block.id} {command}")


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}, a heading that does not exist"


@pytest.mark.parametrize("block", list(blocks("python")))
def test_python_blocks_run(block, tmp_path):
    file = tmp_path / "block.py"  # a file, because kernels are read from their source
    file.write_text(block)
    runpy.run_path(str(file))


@pytest.mark.parametrize("block", list(blocks("python needs GPUs")))
def test_python_blocks_that_need_gpus_name_what_exists(block):
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tw":
            assert hasattr(tileweave, node.attr), f"tileweave has no {node.attr}"
        if isinstance(node, ast.ImportFrom) and node.module.startswith("tileweave"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


@pytest.mark.parametrize(("command", "output"), list(commands()))
def test_console_blocks_show_what_is_printed(command, output, capsys):
    program, *arguments = shlex.split(command)
    if program == "python":
        runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")
    else:
        assert program == "tileweave"
        assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", output).split()
    assert PREDICTED.findall(printed) == PREDICTED.findall(output)


def test_every_op_has_a_page():
    titles = [page.read_text().partition("\n")[0] for page in ROOT.glob("docs/ops/*.md")]
    missing = [op for op in ROUTES if not any(re.search(rf"\b{op}\b", title) for title in titles)]
    assert not missing, f"no title of a page in docs/ops names {missing}"


def test_every_word_of_a_kernel_is_explained():
    page = (ROOT / "docs" / "writing-a-kernel.md").read_text()
    missing = [word for word in WORDS + HOST if f"`{word}`" not in page]
    assert not missing, f"docs/writing-a-kernel.md says nothing of {missing}"


def test_the_make_targets_of_the_readme_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert {"run", "test"} <= named <= targets


def device_lines(path):
    """Lines of code of a kernel file: (of its roles, of the aggregate they share and the kernel that starts them)."""
    source = path.read_text()
    counts = {True: 0, False: 0}
    for node in ast.parse(source).body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        first = node.body[0]
        documented = range(first.lineno, first.end_lineno + 1) if ast.get_docstring(node) else ()
        numbers = range(node.decorator_list[0].lineno, node.end_lineno + 1)
        lines = (
            line.strip()
            for number, line in enumerate(source.splitlines(), 1)
            if number in set(numbers) - set(documented)
        )
        is_role = isinstance(node, ast.FunctionDef) and not node.name.endswith("_kernel")
        counts[is_role] += sum(bool(line) and not line.startswith("#") for line in lines)
    return counts[True], counts[False]


def test_the_docs_say_how_long_the_kernels_are():
    roles, shared = device_lines(ROOT / "src/tileweave/ops/matmul_reduce_scatter/kernel.py")
    readme, design = (" ".join((ROOT / page).read_text().split()) for page in ("README.md", "docs/design.md"))
    said = [
        (readme, r"has about (\d+) lines of device code", roles + shared),
        (design, r"`kernel.py` of `matmul_reduce_scatter` has about (\d+) lines of roles", roles),
        (design, r"besides about (\d+) that declare", shared),
    ]
    for page, sentence, count in said:
        assert abs(int(re.search(sentence, page)[1]) - count) <= 5, f"{sentence}: there are {count}"
