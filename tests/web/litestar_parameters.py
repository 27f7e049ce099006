"""How a Litestar handler marks its parameters, by the names of Litestar 2.23, in older versions too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

from litestar import di, params

__all__ = ["FromPath", "HeaderParameter", "JSONBody", "NamedDependency"]

T = TypeVar("T")

if TYPE_CHECKING:
    from litestar.di import NamedDependency
    from litestar.params import FromPath, HeaderParameter, JSONBody
else:
    NamedDependency = getattr(di, "NamedDependency", None) or Annotated[T, params.Dependency()]
    FromPath = getattr(params, "FromPath", None) or Annotated[T, "in the path"]
    JSONBody = getattr(params, "JSONBody", None) or Annotated[T, params.Body()]
    HeaderParameter = getattr(params, "HeaderParameter", None) or (lambda name: params.Parameter(header=name))
