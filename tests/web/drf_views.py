"""The payments API of the suite in Django REST framework. Nothing here asserts."""

from __future__ import annotations

from typing import Any

from rest_framework.exceptions import APIException
from rest_framework.views import APIView

from oncekey.testing.framework_suite import Abort, Payments, unprotected


class Aborted(APIException):
    """REST framework's HTTP exception, with any status."""

    def __init__(self, status: int) -> None:
        super().__init__("aborted")
        self.status_code = status


def api_views(payments: Payments) -> tuple[Any, Any]:
    """The payment, and the unprotected view."""
    from tests.web.django_apps import respond

    class Bare(APIView):
        """Without ``Allow`` and ``Vary``, which other frameworks do not add."""

        default_response_headers: Any = {}  # noqa: RUF012

    class Pay(Bare):
        def post(self, request: Any, **_: Any) -> Any:
            try:
                return respond(payments.handle(request.query_params.get("m", "ok")))
            except Abort as abort:
                raise Aborted(abort.status) from abort

    class Other(Bare):
        def get(self, request: Any) -> Any:
            return respond(unprotected())

        def post(self, request: Any) -> Any:
            return respond(unprotected())

    return Pay.as_view(), Other.as_view()
