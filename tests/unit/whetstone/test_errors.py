"""The errors of what all programs share are one tree, drawn in `whetstone.errors`."""

import ast
from pathlib import Path

from whetstone import errors

ROOT = Path(errors.__file__).parent


def test_every_error_of_the_package_is_in_the_tree():
    bases = {
        node.name: {ast.unparse(base) for base in node.bases}
        for path in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    outside = [name for name, of in bases.items() if of & {"Exception", "BaseException"}]
    # A private exception only leaves a loop or a program; its own file catches it.
    assert [name for name in outside if not name.startswith("_")] == ["WhetstoneError"]
    tree = {name for name, of in bases.items() if of & {"WhetstoneError", "VllmError"}}
    drawn = errors.__doc__ or ""
    assert not [name for name in tree if f"── {name} " not in drawn and f"── {name}\n" not in drawn]
