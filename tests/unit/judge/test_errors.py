"""The judge's errors are one tree, drawn in `judge.errors`."""

import ast
from pathlib import Path

from judge import errors

ROOT = Path(errors.__file__).parent
APART = {"ProgramFailed"}
"""Errors of the process that runs a reward function: it imports nothing of ours."""


def test_every_error_of_the_program_is_in_the_tree():
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and node.name not in APART
    }
    roots = {"Exception", "BaseException", "ValueError", "RuntimeError", "OSError"}
    assert [name for name, of in bases.items() if of & roots] == ["JudgeError"]
    tree = {name for name, of in bases.items() if of & {"JudgeError", "NoReward", "CallFailed"}}
    drawn = errors.__doc__ or ""
    assert not [name for name in tree if f"── {name} " not in drawn and f"── {name}\n" not in drawn]
