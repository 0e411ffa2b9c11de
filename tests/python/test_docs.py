"""The documents: Python snippets run and print what is said below them; links lead somewhere."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@dataclass
class Fence:
    """A fenced block of a document."""

    line: int  # of its first line of content, from 1
    language: str
    text: str
    follows: bool  # directly after the block before it


def fences_of(document: Path) -> Iterator[Fence]:
    lines = document.read_text().splitlines()
    opened, follows = None, False
    for number, line in enumerate(lines, 1):
        if opened is None and line.startswith("```"):
            opened = Fence(number + 1, line[3:].strip(), "", follows)
        elif opened is not None and line == "```":
            opened.text = "\n".join([*lines[opened.line - 1 : number - 1], ""])
            yield opened
            opened, follows = None, True
        elif opened is None and line:
            follows = False
    assert opened is None, f"{document.name}:{opened.line}: the block is not closed"


def names_of(documents: list[Path]) -> list[str]:
    return [str(document.relative_to(ROOT)) for document in documents]


def having(language: str) -> Any:
    """Parametrize by the documents that have blocks of a language."""
    documents = [d for d in DOCUMENTS if any(f.language == language for f in fences_of(d))]
    return pytest.mark.parametrize("document", documents, ids=names_of(documents))


# Runs snippets of (line, text) in one session and writes what each prints.
_SESSION = """
import contextlib, io, json, sys
name, snippets = json.load(sys.stdin)
session = {"__name__": "__main__"}
printed = []
for line, text in snippets:
    # Empty lines before it make the line numbers of tracebacks those of the document.
    code = compile("\\n" * (line - 1) + text, name, "exec")
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(code, session)
    printed.append(out.getvalue())
json.dump(printed, sys.stdout)
"""


def run(document: Path, snippets: list[Fence], folder: Path) -> list[str]:
    """Run snippets in a process of their own; return what each prints."""
    # Where the command `bascule` is.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", _SESSION],
        input=json.dumps([str(document), [(s.line, s.text) for s in snippets]]),
        capture_output=True,
        text=True,
        cwd=folder,
        env=os.environ | {"PATH": path},
    )
    assert done.returncode == 0, done.stderr
    printed: list[str] = json.loads(done.stdout)
    return printed


@having("python")
def test_snippets(document: Path, tmp_path: Path) -> None:
    """All of one document run in one session, top to bottom; a `text` block below is the output."""
    if "import torch" in document.read_text():
        pytest.importorskip("torch")
    fences = list(fences_of(document))
    snippets = [fence for fence in fences if fence.language == "python"]
    printed = dict(zip((s.line for s in snippets), run(document, snippets, tmp_path), strict=True))
    for snippet, below in itertools.pairwise(fences):
        if snippet.language == "python" and below.language == "text" and below.follows:
            where = f"{document.relative_to(ROOT)}:{below.line}"
            assert printed[snippet.line] == below.text, f"{where} is not what the snippet prints"


@having("json")
def test_json(document: Path) -> None:
    for fence in fences_of(document):
        if fence.language == "json":
            json.loads(fence.text)


def anchors_of(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as GitHub makes them."""
    code = {n for f in fences_of(document) for n in range(f.line, f.line + f.text.count("\n"))}
    anchors = set()
    for number, line in enumerate(document.read_text().splitlines(), 1):
        if number not in code and (heading := re.fullmatch(r"#+ (.*)", line)):
            words = re.sub(r"[^\w\- ]", "", heading[1].lower())
            anchors.add(words.replace(" ", "-"))
    return anchors


@pytest.mark.parametrize("document", DOCUMENTS, ids=names_of(DOCUMENTS))
def test_links(document: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = document.parent / path if path else document
        assert target.exists(), f"{link} leads nowhere"
        if anchor and target.suffix == ".md":
            assert anchor in anchors_of(target), f"{link} names no heading"
