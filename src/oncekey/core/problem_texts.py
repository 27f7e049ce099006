"""The sentences, titles and codes of the answers that oncekey itself sends, one entry for each situation.

Every message says what happened, what it means, and what to do. ``problems.py`` builds the answers from them.
"""

from __future__ import annotations

from enum import StrEnum

from oncekey.core.values import value

TAKEN_OVER = "Another attempt took this Idempotency-Key over while this one ran, and is still being processed."
OF_A_BOUND_KEY = (
    "An Idempotency-Key belongs to one request of one caller: this one was first used by another caller (user, client "
    "or device), or with a different request. This request was not executed, and the first one is untouched."
)
"""The same for both reasons: it must not tell a caller which requests another one has sent."""
WHICH_KEY = "Which key? It is at the end of the path, or the value of the Idempotency-Key header."
BODY_DROPPED = (
    "The body did not arrive, as can happen to a request that has an Upgrade header: send it without that header (in "
    "Java, choose HTTP_1_1). This request was not executed. Whether an earlier request with this key was executed was "
    "not checked."
)
"""Details: they replace the first sentence of an answer where more is known than the situation."""


class Situation(StrEnum):
    """Why a request gets oncekey's own answer instead of the handler's."""

    KEY_MISSING = "key-missing"
    KEY_MALFORMED = "key-malformed"
    KEY_PERSONAL = "key-personal"
    MISMATCH = "mismatch"
    IN_FLIGHT = "in-flight"
    ACCEPTED = "accepted"  # in flight, for routes with in_flight="accepted"
    UNKNOWN = "outcome-unknown"
    DEFERRED = "deferred"
    LIMITED = "limited"
    BODY_TOO_LARGE = "body-too-large"
    BODY_INCOMPLETE = "body-incomplete"
    STORE_UNAVAILABLE = "store-unavailable"  # before the handler: nothing happened
    UNREADABLE = "not-comparable"  # before the handler: the row's fingerprint cannot be computed here
    ANSWER_LOST = "answer-lost"  # before the handler: the row is final, and its fingerprint can never be computed again
    NOT_STORED = "not-stored"  # after the handler: it ran, and its answer could not be stored yet
    TIMESTAMP_REFUSED = "timestamp-refused"
    NOT_AUTHENTICATED = "not-authenticated"
    SIGNATURE_INVALID = "signature-invalid"
    NOT_AUTHORIZED = "not-authorized"
    NOT_EXECUTED = "not-executed"  # nothing happened, in this attempt or in any before it
    NOT_FINISHED = "not-finished"  # finished steps stay done, and a retry with the same key resumes after them
    FAILED = "failed"  # the handler raised, an error handler of the app answered with a success, and it is not stored
    REFUSED = "refused"
    REFUSED_LATE = "refused-late"  # after the operation had begun: like any other 4xx of a handler
    STATUS_EXPIRED = "status-expired"
    STATUS_NOT_FOUND = "status-not-found"
    STATUS_RETRYABLE = "status-retryable"
    TIMED_OUT = "timed-out"  # stored by the reaper as the final answer of a deferred request


@value
class Entry:
    """The answer of one situation, in all profiles."""

    statuses: tuple[int, int, int]
    """Of the profiles ietf, stripe and governance."""
    title: str
    happened: str
    """What happened, and what it means. A caller's ``detail`` replaces it."""
    advice: str
    """What the client should do."""
    stripe: tuple[str, str]
    """Type and code of Stripe's error object."""
    fault: str
    """The ``errorCode`` of the governance profile."""
    retry_seconds: int | None = None
    """Retry-After, if the caller gives none. None: this answer never has one."""


_SAME_KEY = "Keep the key: send the same request with the same Idempotency-Key after the time in Retry-After"
_NOT_LOOKED_UP = "This request was not executed. Whether an earlier request with this key was executed was not checked."
_INVALID, _IDEMPOTENCY, API_ERROR = "invalid_request_error", "idempotency_error", "api_error"

# fmt: off
ENTRIES: dict[Situation, Entry] = {
    Situation.KEY_MISSING: Entry(
        (400, 400, 400), "Idempotency-Key is missing",
        "This operation requires an Idempotency-Key header, and the request has none: send it again with a "
        "new unique key, such as a UUID.",
        "This request was not executed. Use the same key for every retry of the same request.",
        (_INVALID, "idempotency_key_missing"), "IDEMPOTENCY_KEY_MISSING"),
    Situation.KEY_MALFORMED: Entry(
        (400, 400, 400), "Idempotency-Key is malformed",
        "The Idempotency-Key header is not one that this API takes: send one header with one unique value, "
        "such as a UUID.",
        "This request was not executed. Use the same key for every retry of the same request.",
        (_INVALID, "idempotency_key_malformed"), "IDEMPOTENCY_KEY_MALFORMED"),
    Situation.KEY_PERSONAL: Entry(
        (400, 400, 400), "Idempotency-Key looks like personal data",
        "The Idempotency-Key looks like personal data or a credential, which this operation does not take as a key.",
        "This request was not executed, and no earlier one with this key is known here. Send it with a random UUID as "
        "its key, and with the same one in every retry.",
        (_INVALID, "idempotency_key_personal"), "IDEMPOTENCY_KEY_PERSONAL"),
    Situation.MISMATCH: Entry(
        (422, 400, 422), "Idempotency-Key is already used",
        "An Idempotency-Key may not be reused with a different request: this one was first used with another "
        "method, path, query, media type, body or precondition (If-Match). This request was not executed, and the "
        "first one is untouched.",
        "For a new operation use a new key; to repeat the first request, send it unchanged.",
        (_IDEMPOTENCY, "idempotency_key_reused"), "IDEMPOTENCY_CONFLICT"),
    Situation.IN_FLIGHT: Entry(
        (409, 409, 409), "A request is outstanding for this Idempotency-Key",
        "A request with this Idempotency-Key is still being processed. This one was not executed.",
        f"{_SAME_KEY}, and get the result of the first.",
        (_IDEMPOTENCY, "idempotency_key_in_use"), "IDEMPOTENCY_IN_PROGRESS", 1),
    Situation.ACCEPTED: Entry(
        (202, 202, 202), "The request is being processed",
        "A request with this Idempotency-Key is still being processed, and this answer is not its result.",
        f"{_SAME_KEY}, or ask the address in Location.",
        (API_ERROR, "idempotency_accepted"), "IDEMPOTENCY_ACCEPTED", 1),
    Situation.UNKNOWN: Entry(
        (409, 409, 409), "The outcome of this Idempotency-Key is not known yet",
        "A request with this Idempotency-Key, this one or an earlier one, may or may not have taken effect, so "
        "it is not executed again.",
        "Keep the key, since a new one could do the operation twice. The operator of this API settles the outcome, not "
        "the client, and then the same request with the same key gets it: ask again after the time in Retry-After. If "
        "it takes too long, contact the operator and give the reference that is in this answer.",
        (_IDEMPOTENCY, "idempotency_outcome_unknown"), "IDEMPOTENCY_OUTCOME_UNKNOWN", 60),
    Situation.DEFERRED: Entry(
        (202, 202, 202), "The request is accepted",
        "The request with this Idempotency-Key was accepted and is still being worked on.",
        f"{_SAME_KEY}, or ask the address in Location if there is one.",
        (API_ERROR, "idempotency_deferred"), "IDEMPOTENCY_DEFERRED", 2),
    Situation.LIMITED: Entry(
        (429, 429, 429), "Too many Idempotency-Keys",
        "This caller has used more keys than this API allows at once or in this time. This request was not executed.",
        f"{_SAME_KEY}.",
        (_INVALID, "rate_limit"), "IDEMPOTENCY_LIMIT_REACHED", 1),
    Situation.BODY_TOO_LARGE: Entry(
        (413, 413, 413), "The request body is too large",
        f"The body is larger than this operation takes under an Idempotency-Key. {_NOT_LOOKED_UP}",
        "Send a smaller body, with a new key.",
        (_INVALID, "request_too_large"), "IDEMPOTENCY_BODY_TOO_LARGE"),
    Situation.BODY_INCOMPLETE: Entry(
        (400, 400, 400), "The request body is incomplete",
        f"The body is not as long as its Content-Length says. {_NOT_LOOKED_UP}",
        "Send it again, whole, with the same key.",
        (_INVALID, "request_incomplete"), "IDEMPOTENCY_BODY_INCOMPLETE"),
    Situation.STORE_UNAVAILABLE: Entry(
        (503, 503, 503), "Idempotency cannot be guaranteed right now",
        "The store of Idempotency-Keys does not answer, so this request was not executed. Whether an "
        "earlier request with this key was executed is not known until the store answers.",
        f"{_SAME_KEY}.",
        (API_ERROR, "idempotency_store_unavailable"), "IDEMPOTENCY_STORE_UNAVAILABLE", 1),
    Situation.UNREADABLE: Entry(
        (503, 503, 503), "This Idempotency-Key cannot be answered right now",
        "This API has accepted an earlier request with this key, and cannot read what it kept of it right now. So this "
        "request was not executed.",
        f"{_SAME_KEY}, and never with a new one, which could do the operation twice.",
        (API_ERROR, "idempotency_not_comparable"), "IDEMPOTENCY_NOT_COMPARABLE", 5),
    Situation.ANSWER_LOST: Entry(
        (410, 410, 410), "The answer for this Idempotency-Key is lost",
        "This API has finished a request with this key, and has lost what it kept of it. So it cannot tell whether "
        "this request is the same one, and did not execute it.",
        "To repeat it with this key does not help. Look up where this API lists it whether the operation took effect: "
        "a request with a new key could do it twice.",
        (_IDEMPOTENCY, "idempotency_answer_lost"), "IDEMPOTENCY_ANSWER_LOST"),
    Situation.NOT_STORED: Entry(
        (503, 503, 503), "The result could not be stored yet",
        "The request was worked on, but its result could not be stored, and no result is sent before it is "
        "stored. It may or may not have taken effect.",
        f"{_SAME_KEY}, and never with a new one, which could do the operation twice.",
        (API_ERROR, "idempotency_result_not_stored"), "IDEMPOTENCY_RESULT_NOT_STORED", 1),
    Situation.TIMESTAMP_REFUSED: Entry(
        (400, 400, 400), "The request is too old, or does not say when it was made",
        "This operation takes new requests only for a while after they were made.",
        "This request was not executed. An earlier one with this key may have been, too long ago to be known here: "
        "look up its result where this API lists it, before you make a new request with a new key and a new time.",
        (_INVALID, "timestamp_refused"), "TIMESTAMP_REFUSED"),
    Situation.NOT_AUTHENTICATED: Entry(
        (401, 401, 401), "Authentication is required",
        "An Idempotency-Key belongs to an authenticated caller, and this request is not authenticated. Nothing was "
        "looked up or executed.",
        "Authenticate, and send the request again with the same key.",
        (_INVALID, "authentication_required"), "AUTHENTICATION_REQUIRED"),
    Situation.SIGNATURE_INVALID: Entry(
        (401, 401, 401), "The signature of the request does not hold",
        "The request has no valid signature, or it was signed too long ago. Nothing was looked up or executed.",
        "Sign the body exactly as it is sent, with the secret that this API knows, and send it again with the same id.",
        (_INVALID, "signature_invalid"), "SIGNATURE_INVALID"),
    Situation.NOT_AUTHORIZED: Entry(
        (403, 403, 403), "This operation is not allowed",
        "This caller may not use this operation, with any Idempotency-Key. Nothing was looked up or executed.",
        "Send the request again with the same key when the permission is there.",
        (_INVALID, "not_authorized"), "NOT_AUTHORIZED"),
    Situation.NOT_EXECUTED: Entry(
        (503, 503, 503), "The request was not executed",
        "The operation could not be done right now, and it is certain that it had no effect.",
        f"{_SAME_KEY}.",
        (API_ERROR, "not_executed"), "NOT_EXECUTED", 1),
    Situation.NOT_FINISHED: Entry(
        (503, 503, 503), "The request is not finished",
        "This attempt ended without a result. This or an earlier attempt may have done a part of the operation.",
        f"{_SAME_KEY}, and never with a new one, which could do the operation twice.",
        (API_ERROR, "not_finished"), "NOT_FINISHED", 1),
    Situation.FAILED: Entry(
        (500, 500, 500), "The request ended in an error",
        "The operation ended in an error, and its result was not kept.",
        "Keep the key: the same request with the same Idempotency-Key tries again, and a new one could do the "
        "operation twice. If it fails again, contact the operator of this API.",
        (API_ERROR, "operation_failed"), "OPERATION_FAILED"),
    Situation.REFUSED: Entry(
        (422, 422, 422), "The request was refused",
        "The request was refused before the operation began.",
        "Nothing was executed: correct the request; the key is unused, so send it with the same one or a new one.",
        (_INVALID, "request_refused"), "REQUEST_REFUSED"),
    Situation.REFUSED_LATE: Entry(
        (422, 422, 422), "The request was refused while it was processed",
        "The request was refused after the operation had begun.",
        "The key stands for this request: look up what it has done before you send a corrected one, which needs "
        "a new key.",
        (_INVALID, "request_refused_late"), "REQUEST_REFUSED_LATE"),
    Situation.STATUS_EXPIRED: Entry(
        (410, 410, 410), "The Idempotency-Key has expired",
        "A request with this key has ended, and its result is no longer kept.",
        "Look for its result where this API lists it: a request with this key would be "
        "executed as a new one.",
        (_INVALID, "idempotency_key_expired"), "IDEMPOTENCY_KEY_EXPIRED"),
    Situation.STATUS_NOT_FOUND: Entry(
        (404, 404, 404), "No such Idempotency-Key",
        "No request of yours with this key is known here.",
        "Check the key, and the account that you are authenticated as. If the request was never received, send it "
        "with this key. If the operation does not take this key, the answer says so, and nothing is executed.",
        (_INVALID, "resource_missing"), "IDEMPOTENCY_KEY_NOT_FOUND"),
    Situation.STATUS_RETRYABLE: Entry(
        (409, 409, 409), "The request was not finished",
        "The last request with this Idempotency-Key ended without a result, or stopped in the middle. "
        "Asking again does not change that. Sending the request again does.",
        f"{_SAME_KEY}.",
        (_IDEMPOTENCY, "idempotency_key_retryable"), "IDEMPOTENCY_RETRYABLE", 1),
    Situation.TIMED_OUT: Entry(
        (408, 408, 408), "The request was not done in time",
        "The request was accepted, but it was not done before its Idempotency-Key expired. It was cancelled, and "
        "is not tried any more.",
        "Look up where this API lists it whether an earlier try took effect; if not, and it is still wanted, send "
        "it again with a new key.",
        (API_ERROR, "idempotency_timed_out"), "IDEMPOTENCY_TIMED_OUT"),
}
# fmt: on

BODY_NOT_KEPT = (
    "The request with this Idempotency-Key was answered, and this is its status; the body of its response "
    "was not kept, because it was too large or streamed. It was not executed again: look up the result where this API "
    "lists it."
)
"""The note in place of a body that was not kept."""
BODY_NOT_READABLE = (
    "The request with this Idempotency-Key was answered, and this is its status; the body of its response is kept, but "
    "cannot be read right now. It was not executed again: send the same request with the same key later, or look up "
    "the result where this API lists it."
)
"""The note in place of a body that is encrypted and did not open, or that a newer version wrote."""
