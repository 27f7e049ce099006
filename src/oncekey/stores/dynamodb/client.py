"""The connection to DynamoDB: requests with a deadline, repeated where that is safe, and several at a time.

botocore's own repeats are switched off. This module repeats a request that was throttled, or whose answer was lost, as
long as another attempt can end before the verb's deadline. A write that is repeated carries the same number, so the
store recognises its own success (``writes.py``).

One botocore client serves all threads of a process. A forked child makes its own: it never uses its parent's sockets.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError, PartialCredentialsError

from oncekey.errors import ConfigurationError, OnceKeyError, SchemaError, StoreError, StoreUnavailable
from oncekey.stores.dynamodb.settings import Settings

AT_ONCE = 16
"""How many requests of one process are under way at the same time, for its lanes."""
IN_BACKGROUND = 4
"""The same for upkeep and operators, in threads of their own: their many pages must not delay the keys of clients."""
LONG_SECONDS = 60.0
"""How long a verb of upkeep or of an operator may take that reads many pages. Each of its requests has the ordinary
limit."""
_READ_PART, _CONNECT_PART = 0.4, 0.2
"""Parts of the time limit. So after a first answer that was lost there is time for a second attempt."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.025, 1.0

_LATER = {
    "ProvisionedThroughputExceededException": "it is throttled: raise the table's limits, or use on-demand capacity",
    "ThrottlingException": "it is throttled: raise the table's limits, or wait until it has scaled up",
    "RequestLimitExceeded": "the account's limit is reached: ask for a higher one",
    "LimitExceededException": "the account's limit is reached: ask for a higher one",
    "TransactionConflictException": "another program writes to this table: give it one of its own",
    "TransactionInProgressException": "another program writes to this table: give it one of its own",
    "InternalServerError": "it has an internal error",
    "InternalFailure": "it has an internal error",
    "ServiceUnavailable": "it is down",
}
"""What may succeed if it is asked again, with what it means if it does not."""
_THROTTLED = ("ProvisionedThroughputExceededException", "ThrottlingException", "RequestLimitExceeded")
_REFUSED = {
    "AccessDeniedException": "its IAM policy does not allow this: docs/stores.md has one that does",
    "UnrecognizedClientException": "the credentials are not valid",
    "InvalidSignatureException": "the credentials are not valid, or this host's clock is more than minutes off",
    "ExpiredTokenException": "the credentials have expired",
    "MissingAuthenticationTokenException": "the credentials are missing",
}
_MISSING = "does not exist, or an index of it: run `oncekey migrate`"

_T = TypeVar("_T")
Item = dict[str, Any]


class Conflict(Exception):
    """A condition did not hold. ``item``: the item as it is, where the server returns it with the refusal."""

    def __init__(self, item: Item | None) -> None:
        super().__init__()
        self.item = item


class Throttled(StoreUnavailable):
    """Every attempt was refused because of a limit: nothing was applied."""


class Client:
    """The botocore client of this process, made when it is first used."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._made: Any = None
        self._pools: dict[int, ThreadPoolExecutor] = {}
        self._inherited: list[object] = []

    def verb(self, *, long: bool = False) -> Verb:
        """A verb begins: all its requests share one deadline. Making the client, once, is not part of it."""
        self.made()
        limit = max(LONG_SECONDS, self._settings.timeout) if long else self._settings.timeout
        return Verb(self, self._settings, time.monotonic() + limit, IN_BACKGROUND if long else AT_ONCE)

    def made(self) -> Any:
        self._after_fork()
        with self._lock:
            if self._made is None:
                self._made = _make(self._settings)
            return self._made

    def pool(self, size: int) -> ThreadPoolExecutor:
        self._after_fork()
        with self._lock:
            if size not in self._pools:
                self._pools[size] = ThreadPoolExecutor(size, thread_name_prefix="oncekey-dynamodb")
            return self._pools[size]

    def _after_fork(self) -> None:
        """The parent's sockets and threads are kept, so that they are not closed, and never used."""
        if self._pid != os.getpid():
            self._inherited += [self._made, self._pools]
            self._lock = threading.Lock()
            self._made, self._pools = None, {}
            self._pid = os.getpid()

    def close(self) -> None:
        """Close the connections; the next verb opens others."""
        self._after_fork()
        with self._lock:
            made, self._made = self._made, None
            pools, self._pools = self._pools, {}
        for pool in pools.values():
            pool.shutdown(wait=True)
        if made is not None:
            made.close()


def _make(settings: Settings) -> Any:
    config = Config(
        connect_timeout=settings.timeout * _CONNECT_PART,
        read_timeout=settings.timeout * _READ_PART,
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=AT_ONCE + IN_BACKGROUND + 4,  # the lanes ask by themselves, too
    )
    try:
        # A session of its own: the default one is shared with the app, and making a client on it is not thread-safe.
        session = boto3.session.Session(region_name=settings.region)
        return session.client("dynamodb", endpoint_url=settings.endpoint, config=config)
    except NoRegionError as error:
        raise ConfigurationError(
            f"the region of {settings.where} is not known: add ?region=… to the URL, or set AWS_REGION"
        ) from error
    except (BotoCoreError, ValueError) as error:
        raise ConfigurationError(
            f"the SDK cannot be set up for {settings.where} ({type(error).__name__}): check region=, and endpoint=, "
            "which begins with http:// or https://"
        ) from error


class Verb:
    """The requests of one verb."""

    def __init__(self, client: Client, settings: Settings, deadline: float, at_once: int) -> None:
        self._client = client
        self._settings = settings
        self._deadline = deadline
        self._at_once = at_once
        self._one_attempt = settings.timeout * (_READ_PART + _CONNECT_PART)
        self._gone: StoreUnavailable | None = None
        """The server does not answer: requests of this verb that have not begun do not wait for it, too."""

    def __call__(self, operation: str, **request: Any) -> Item:
        """One request about the table. Raises Conflict if its condition did not hold."""
        if operation not in ("batch_get_item", "batch_write_item"):
            request["TableName"] = self._settings.table
        begun = time.monotonic()
        throttled = True
        for attempt in range(1000):
            if self._gone is not None:
                raise self._gone
            if time.monotonic() > self._deadline:
                break
            try:
                answer: Item = getattr(self._client.made(), operation)(**request)
            except (BotoCoreError, ClientError) as error:
                trouble = self._explained(error)
                if not isinstance(trouble, _Again):
                    raise trouble from error
                pause = _pause(attempt)
                last = min(self._deadline, begun + self._settings.timeout)
                throttled = throttled and trouble.throttled
                if time.monotonic() + pause + self._one_attempt > last:
                    sentence = f"{self._settings.where} {trouble}"
                    if throttled:
                        raise Throttled(sentence) from error
                    self._gone = StoreUnavailable(sentence)
                    raise self._gone from error
                time.sleep(pause)
            else:
                return answer
        raise StoreUnavailable(f"{self._settings.where} did not answer in time")

    def all(self, work: Callable[[_T], Any], things: Sequence[_T], *, if_throttled: Any = None) -> list[Any]:
        """``work`` for each of the things, several at a time; the results are in the order of the things.

        The first exception, if there is one, is raised when all have ended. ``if_throttled``: the result of those that
        were throttled, if others were not. So a key that a client hammers does not take others down with it.
        """
        if len(things) <= 1:
            return [work(thing) for thing in things]
        results = list(self._client.pool(self._at_once).map(lambda thing: _outcome(work, thing), things))
        errors = [result for result in results if isinstance(result, Exception)]
        only_throttled = all(isinstance(error, Throttled) for error in errors)
        if errors and (if_throttled is None or not only_throttled or len(errors) == len(results)):
            raise next((error for error in errors if not isinstance(error, Throttled)), errors[0])
        return [if_throttled() if isinstance(result, Exception) else result for result in results]

    def _explained(self, error: BotoCoreError | ClientError) -> Exception:
        where = self._settings.where
        if isinstance(error, ClientError):
            return _refusal(error, where)
        if isinstance(error, NoCredentialsError | PartialCredentialsError):
            return StoreUnavailable(
                f"{where} cannot be asked: the SDK finds no credentials; give this process a role or a profile"
            )
        name = type(error).__name__
        if name in ("ReadTimeoutError", "ConnectTimeoutError"):
            return _Again("did not answer in time")
        if name in ("ParamValidationError", "UnknownServiceError"):
            return StoreError(f"{where} was asked something that the SDK refuses ({name})")
        return _Again(f"is unavailable ({name}): is the address right, and the network up?")


class _Again(Exception):
    """Another attempt may succeed. The text says what is the matter if none does."""

    def __init__(self, trouble: str, *, throttled: bool = False) -> None:
        super().__init__(trouble)
        self.throttled = throttled


def _refusal(error: ClientError, where: str) -> Exception:
    said: Any = error.response
    code = str(said.get("Error", {}).get("Code", ""))
    text = str(said.get("Error", {}).get("Message", ""))
    status = int(said.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if code == "ConditionalCheckFailedException":
        return Conflict(said.get("Item"))
    if code in _LATER or status >= 500:
        return _Again(f"is unavailable: {_LATER.get(code, 'it is down')}", throttled=code in _THROTTLED)
    if code in _REFUSED:
        return StoreUnavailable(f"{where} refuses this process: {_REFUSED[code]}")
    if code == "ResourceNotFoundException" or "specified index" in text:
        return SchemaError(f"{where} {_MISSING}")
    if code == "ResourceInUseException":
        return InUse()
    if "tem size" in text:
        return StoreError(
            f"a key in {where} has more to keep than an item can hold (400 KB): keep less in the results of its steps"
        )
    return StoreError(f"{where} refused a request ({code})")  # its message may quote a key


class InUse(OnceKeyError):
    """The table is being made or changed, by this or another process."""


def _pause(attempt: int) -> float:
    """The first repeat is at once: most often the server had closed an idle connection."""
    longest = min(_FIRST_PAUSE * 2**attempt, _LONGEST_PAUSE) if attempt else 0.0
    return longest * random.uniform(0.5, 1.0)  # noqa: S311 - jitter is not a secret


def _outcome(work: Callable[[_T], Any], thing: _T) -> Any:
    try:
        return work(thing)
    except Exception as error:  # noqa: BLE001 - the caller raises it, after all others have ended
        return error


def chunks(things: Iterable[_T], size: int) -> list[list[_T]]:
    listed = list(things)
    return [listed[at : at + size] for at in range(0, len(listed), size)]
