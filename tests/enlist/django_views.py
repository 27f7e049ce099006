"""Views as most projects write them: each pays once, in the transaction that it enlists."""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.http import HttpResponse, JsonResponse

from oncekey import current
from tests.enlist.django_site import Site


def pay_in_block(site: Site, request: Any) -> HttpResponse:
    """As most views are written; with ATOMIC_REQUESTS the block is a savepoint."""
    with transaction.atomic(using=site.alias):
        current().enlist()
        site.pay()
    return JsonResponse({"paid": current().key}, status=201)


def pay_plainly(site: Site, request: Any) -> HttpResponse:
    """Without a block: it opens one, or takes that of ATOMIC_REQUESTS."""
    current().enlist()
    site.pay()
    return JsonResponse({"paid": current().key}, status=201)


VIEWS = [pay_in_block, pay_plainly]
