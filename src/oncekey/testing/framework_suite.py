"""The public suite for frameworks: an adapter that passes it protects its framework.

Write one small payments API in your framework, protect it, and run pytest (with httpx installed). In an ASGI framework
with async handlers::

    from oncekey import OnceKey
    from oncekey.testing.framework_suite import Abort, Framework, FrameworkSuite, Payments, unprotected

    def make_app(payments: Payments, once: OnceKey):
        app = MyFramework()

        @app.post("/payments")
        @app.post("/payments/{id}/refunds")
        async def pay(request):
            try:
                reply = await payments.handle_async(request.query.get("m", "ok"))
            except Abort as abort:
                raise HTTPError(abort.status) from abort
            return Response(reply.body, reply.status, reply.header_list)

        ...  # POST /login and GET /status return unprotected()
        protect(app, once)
        return app

    class TestMyFramework(FrameworkSuite):
        framework = Framework(make_app)

``Payments`` counts what its handlers do, and the query says how they end. A reply with ``streamed`` is sent in these
pieces, without a length (``pieces_of``, ``async_pieces_of``).

A WSGI app calls ``payments.handle`` and is ``Framework(make_app, is_async=False)``. An ASGI framework that runs plain
functions in threads also passes with ``Framework(make_sync_app, async_handlers=False)``.

Handlers may also declare what protects them, and apps add endpoints late. With ``Framework(make_app,
make_declaring_app=…)`` the suite tests this too, and what ``oncekey routes`` lists::

    def make_declaring_app(payments: Payments, once: OnceKey):
        app = MyFramework()
        app.post("/declared/{id}")(once.policy(effects="repeatable")(pay))  # ``pay`` as above
        app.post("/exempt")(once.exempt(other))  # returns unprotected()
        protect(app, once)
        app.post("/late")(another_pay)  # does the same as ``pay``, without a declaration
        return app

**Under a real server.** ``FrameworkSuite`` calls the app in this process, over a store in memory. ``ServedSuite`` runs
the same tests, and some that only a connection can have, over HTTP: the app is in a server process of its own, and the
test reads the same store from outside::

    class TestMyFrameworkServed(ServedSuite):
        framework = Framework(make_app)
        server = "uvicorn"  # or "gunicorn", for WSGI

        @pytest.fixture
        def store_url(self, tmp_path):
            return f"sqlite:///{tmp_path}/keys.db"  # empty, and readable by two processes

One process serves all tests of the class; each test has an app, a OnceKey and a store of its own. The process imports
``make_app``, so it must be a function of a module (or a ``functools.partial`` of one), not a lambda.

For another server, ``server`` has the arguments of ``python -m``, with one worker: ``("hypercorn", "--bind",
"{address}", "oncekey.testing.http.serving:asgi")``; a WSGI server gets ``oncekey.testing.http.serving:wsgi()``.
"""

from __future__ import annotations

from oncekey.testing.http.declarations import DeclarationSuite
from oncekey.testing.http.endings import EndingSuite
from oncekey.testing.http.payments import Abort, Payments, Reply, async_pieces_of, pieces_of, unprotected
from oncekey.testing.http.protected import Framework
from oncekey.testing.http.repeats import RepeatSuite
from oncekey.testing.http.requests import RequestSuite
from oncekey.testing.http.served_suite import ServedBase
from oncekey.testing.http.wire import WireSuite

__all__ = [
    "Abort",
    "Framework",
    "FrameworkSuite",
    "Payments",
    "Reply",
    "ServedSuite",
    "async_pieces_of",
    "pieces_of",
    "unprotected",
]


class FrameworkSuite(RepeatSuite, EndingSuite, RequestSuite, DeclarationSuite):
    """Subclass it as ``Test…``; see the module's docstring."""


class ServedSuite(ServedBase, FrameworkSuite, WireSuite):
    """The same for an app under a real server. Subclass it as ``Test…``; see the module's docstring."""
