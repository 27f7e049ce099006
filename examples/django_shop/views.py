import json
import logging

from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.http import require_POST

from examples.django_shop.models import Order
from oncekey import NotAuthenticated, Refused, current
from oncekey.web.django import once

log = logging.getLogger("shop")
CUSTOMERS = {"Bearer ann-secret": "ann", "Bearer bob-secret": "bob"}


def customer_of(request: HttpRequest) -> str:
    """Whose keys these are. It runs before a key is looked up."""
    customer = CUSTOMERS.get(request.headers.get("Authorization", ""))
    if customer is None:
        raise NotAuthenticated
    return customer


@require_POST
@once.policy(effects="transactional")  # here and not for all views: a view that forgets enlist() is not transactional
def order(request: HttpRequest) -> HttpResponse:
    item = json.loads(request.body).get("item")
    if not item:
        raise Refused("an order has an item", status=400)  # the key stays unused
    with transaction.atomic():
        current().enlist()  # the order, the response and the key are one commit
        made = Order.objects.create(customer=customer_of(request), item=item)
        transaction.on_commit(lambda: log.warning("order %s is confirmed", made.pk))  # once, after that commit
    return JsonResponse({"order": made.pk, "item": made.item}, status=201)
