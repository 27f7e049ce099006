"""Adds the strings after a class's fields to its docstring, because ``help()`` does not show them.

They are read from the source when the class is created, so that no sentence stands in two places. If there is no source
(a frozen executable), the docstring stays as it is.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from itertools import pairwise


def with_fields(cls: type) -> str:
    """The docstring of ``cls``, with each annotated field, its default, and the string that follows it."""
    summary = inspect.cleandoc(cls.__doc__ or "")
    try:
        module = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    except (OSError, TypeError, SyntaxError):
        return summary
    body = next((node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__), [])
    parts = [summary]
    for field, after in pairwise(body):
        match field, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=ast.expr() as default),
                ast.Expr(value=ast.Constant(value=str() as reason)),
            ):
                head = f"{name}: {ast.unparse(kind)} = {ast.unparse(default)}"
                parts.append(f"{head}\n{textwrap.indent(inspect.cleandoc(reason), '    ')}")
    return "\n\n".join(parts)
