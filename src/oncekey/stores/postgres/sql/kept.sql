-- The values that encryption covers, as they are stored (stores/sql/kept.py), and how they are written again.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).

-- name: kept_keys
-- A page, in the order of the primary key.
SELECT
    k.scope, k.key, k.response_status, k.response_headers, k.response_body, k.response_schema_version, k.last_error,
    k.state, k.fingerprint_version, date_part('epoch', k.expires_at)
FROM idempotency_keys AS k
WHERE (k.scope, k.key) > (%(after_0)s, %(after_1)s)
ORDER BY k.scope, k.key
LIMIT %(limit)s

-- name: kept_steps
SELECT s.scope, s.key, s.name, s.result
FROM idempotency_steps AS s
WHERE (s.scope, s.key, s.name) > (%(after_0)s, %(after_1)s, %(after_2)s)
ORDER BY s.scope, s.key, s.name
LIMIT %(limit)s

-- name: kept_audit
SELECT a.id, a.scope, a.key, a.event, a.why FROM idempotency_audit AS a
WHERE a.id > %(after_0)s::bigint
ORDER BY a.id
LIMIT %(limit)s

-- name: kept_jobs
SELECT j.id, j.scope, j.key, j.payload, j.last_error, j.history FROM idempotency_outbox AS j
WHERE j.id > %(after_0)s
ORDER BY j.id
LIMIT %(limit)s

-- name: rewrite_keys
-- Write new values over the old ones, where they still are; returns the numbers of the rows that were written.
-- SKIP LOCKED: a row that an open transaction holds is left to a later try. The update compares once more: a row may
-- have changed between the snapshot and the lock.
WITH wanted AS (
    SELECT * FROM unnest(
        %(scope)s, %(key)s, %(old_status)s, %(old_headers)s, %(old_body)s, %(old_version)s, %(old_error)s,
        %(headers)s, %(body)s, %(version)s, %(error)s
    ) WITH ORDINALITY AS w (
        scope, key, old_status, old_headers, old_body, old_version, old_error,
        headers, body, version, error, number
    )
),

held AS (
    SELECT w.*
    FROM wanted AS w
    CROSS JOIN LATERAL (
        SELECT FROM idempotency_keys AS i
        WHERE i.scope = w.scope AND i.key = w.key
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS i
)

UPDATE idempotency_keys AS k SET
    response_headers = h.headers,
    response_body = h.body,
    response_schema_version = h.version,
    last_error = h.error
FROM held AS h
WHERE
    k.scope = h.scope AND k.key = h.key
    AND k.response_status IS NOT DISTINCT FROM h.old_status
    AND k.response_headers IS NOT DISTINCT FROM h.old_headers
    AND k.response_body IS NOT DISTINCT FROM h.old_body
    AND k.response_schema_version IS NOT DISTINCT FROM h.old_version
    AND k.last_error IS NOT DISTINCT FROM h.old_error
RETURNING h.number

-- name: rewrite_steps
WITH wanted AS (
    SELECT * FROM unnest(%(scope)s, %(key)s, %(name)s, %(old_result)s, %(result)s)
    WITH ORDINALITY AS w (scope, key, name, old_result, result, number)
),

held AS (
    SELECT w.*
    FROM wanted AS w
    CROSS JOIN LATERAL (
        SELECT FROM idempotency_steps AS i
        WHERE i.scope = w.scope AND i.key = w.key AND i.name = w.name
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS i
)

UPDATE idempotency_steps AS s SET result = h.result
FROM held AS h
WHERE s.scope = h.scope AND s.key = h.key AND s.name = h.name AND s.result = h.old_result
RETURNING h.number

-- name: rewrite_audit
WITH wanted AS (
    SELECT * FROM unnest(%(id)s::text[]::bigint[], %(old_why)s, %(why)s)
    WITH ORDINALITY AS w (id, old_why, why, number)
),

held AS (
    SELECT w.*
    FROM wanted AS w
    CROSS JOIN LATERAL (
        SELECT FROM idempotency_audit AS i WHERE i.id = w.id FOR NO KEY UPDATE SKIP LOCKED
    ) AS i
)

UPDATE idempotency_audit AS a SET why = h.why
FROM held AS h
WHERE a.id = h.id AND a.why = h.old_why
RETURNING h.number

-- name: rewrite_jobs
WITH wanted AS (
    SELECT * FROM unnest(
        %(id)s, %(old_payload)s, %(old_error)s, %(old_history)s, %(payload)s, %(error)s, %(history)s
    ) WITH ORDINALITY AS w (id, old_payload, old_error, old_history, payload, error, history, number)
),

held AS (
    SELECT w.*
    FROM wanted AS w
    CROSS JOIN LATERAL (
        SELECT FROM idempotency_outbox AS i WHERE i.id = w.id FOR NO KEY UPDATE SKIP LOCKED
    ) AS i
)

UPDATE idempotency_outbox AS j SET payload = h.payload, last_error = h.error, history = h.history
FROM held AS h
WHERE
    j.id = h.id AND j.payload = h.old_payload AND j.last_error IS NOT DISTINCT FROM h.old_error
    AND j.history = h.old_history
RETURNING h.number

-- name: note_walk
-- One line of the audit that belongs to no key.
INSERT INTO idempotency_audit (who, event, scope, key, before, after, why)
VALUES (%(who)s, %(event)s, %(scope)s, %(key)s, %(before)s, %(after)s, %(why)s)
