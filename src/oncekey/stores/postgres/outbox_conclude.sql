-- End attempts: each job that still is running under its owner token, and the key that it settles, if the key still is
-- pending under the token of the attempt that enqueued the job. If a job is not returned, its worker had lost it.
-- Jobs are locked first, in the order of their ids, and keys after them; outbox_time_out.sql does the same.
-- The owner stays in the row: a worker that did not get the answer sees by it that its own write succeeded.
WITH wanted AS (
    SELECT * FROM unnest(
        %(id)s, %(owner)s, %(ending)s, %(retry_in)s, %(error)s,
        %(settle)s, %(status)s, %(headers)s, %(body)s, %(schema_version)s
    ) AS w (id, owner, ending, retry_in, error, settle, status, headers, body, schema_version)
),

held AS (
    SELECT w.*
    FROM (SELECT * FROM wanted ORDER BY id COLLATE "C") AS w
    CROSS JOIN LATERAL (
        SELECT i.id FROM idempotency_outbox AS i
        WHERE i.id = w.id AND i.state = 'running' AND i.owner = w.owner
        OFFSET 0
        FOR NO KEY UPDATE
    ) AS j
),

ended AS (
    UPDATE idempotency_outbox AS j SET
        state = CASE WHEN w.ending IN ('done', 'dead') THEN w.ending ELSE 'ready' END,
        attempt = CASE WHEN w.ending = 'release' THEN j.attempt - 1 ELSE j.attempt END,
        lease_until = NULL,
        run_at = CASE WHEN w.ending = 'retry' THEN now() + w.retry_in * interval '1 second' ELSE j.run_at END,
        last_error = CASE WHEN w.ending = 'release' THEN j.last_error ELSE w.error END,
        history = CASE WHEN w.error IS NULL THEN j.history ELSE {history} END,
        finished_at = CASE WHEN w.ending IN ('done', 'dead') THEN now() END
    FROM held AS w
    WHERE j.id = w.id AND j.state = 'running' AND j.owner = w.owner
    RETURNING j.id, j.owner, j.scope, j.key, j.key_owner, j.settles, w.settle, w.error,
        w.status, w.headers, w.body, w.schema_version
),

settled AS (
    UPDATE idempotency_keys AS k SET
        state = e.settle,
        response_status = e.status,
        response_headers = e.headers,
        response_body = e.body,
        response_schema_version = e.schema_version,
        last_error = CASE WHEN e.settle = 'unknown' THEN e.error END,
        reconcile_at = CASE WHEN e.settle = 'unknown' THEN now() END,
        lease_until = CASE WHEN e.settle = 'unknown' THEN now() ELSE k.lease_until END,
        finished_at = CASE WHEN e.settle IN ('completed', 'failed') THEN now() END,
        expires_at = CASE
            WHEN e.settle IN ('completed', 'failed')
                THEN greatest(k.expires_at, now() + k.retention_seconds * interval '1 second')
            ELSE k.expires_at
        END
    FROM ended AS e
    WHERE
        e.settles AND e.settle IS NOT NULL
        AND k.scope = e.scope AND k.key = e.key AND k.state = 'pending' AND k.owner = e.key_owner
)

SELECT e.id, e.owner FROM ended AS e
