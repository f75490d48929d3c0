"""Every block of the README runs: Python blocks as one program, shell lines as the commands they are."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


def blocks(language: str) -> list[str]:
    """The README's code blocks in one language."""
    return [
        body
        for found, body in BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
        if found == language
    ]


def shell_commands() -> list[list[str]]:
    """Every shell line of the README as arguments, comments dropped."""
    lines = [line for body in blocks("bash") for line in body.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_python_blocks_run_as_they_stand(capsys):
    namespace: dict[str, object] = {}
    for body in blocks("python"):
        exec(compile(body, "README.md", "exec"), namespace)
    assert "Finished" in capsys.readouterr().out


@pytest.mark.parametrize("words", shell_commands(), ids=" ".join)
def test_shell_lines_are_real_commands(words, capsys):
    if words[0].startswith("./tools/"):
        path = ROOT / words[0]
        assert os.access(path, os.X_OK)  # running them here would run this suite inside itself
        return
    assert words[0] == "ninfer-jax"
    if words[1] == "bench":
        from ninfer_jax.cli.main import build_parser

        build_parser().parse_args(words[1:])  # measured by tools/bench, too long for every test run
        return
    from ninfer_jax.cli.main import main

    assert main(words[1:]) == 0
    assert capsys.readouterr().out.strip()


def test_every_link_leads_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert targets
    missing = [target for target in targets if "://" not in target and not (ROOT / target).exists()]
    assert missing == []
