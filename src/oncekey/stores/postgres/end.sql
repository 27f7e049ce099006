-- The owner ends its attempt: the row becomes final, with its response. Every request waits for this statement, so it
-- sets only what such a move can change; swap.sql does every other move. It returns the numbers of the moved rows in
-- the batch. The state to compare comes from `w`: with a constant the planner would consider the index of leases.
WITH wanted AS (
    SELECT * FROM unnest(
        %(scope)s, %(key)s, %(owner)s, %(to_state)s, %(status)s, %(headers)s, %(body)s, %(schema_version)s, %(last_error)s
    ) WITH ORDINALITY AS w (
        scope, key, owner, to_state, status, headers, body, schema_version, last_error, number
    )
),

held AS (
    SELECT w.*, k.part, k.place
    FROM (
        SELECT wanted.*, 'in_progress' AS from_state FROM wanted ORDER BY scope COLLATE "C", key COLLATE "C"
    ) AS w
    CROSS JOIN LATERAL (
        SELECT i.tableoid AS part, i.ctid AS place
        FROM idempotency_keys AS i
        WHERE i.scope = w.scope AND i.key = w.key AND i.state = w.from_state AND i.owner = w.owner
        OFFSET 0
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS k
)

UPDATE idempotency_keys AS k SET
    state = w.to_state,
    response_status = w.status,
    response_headers = w.headers,
    response_body = w.body,
    response_schema_version = w.schema_version,
    last_error = w.last_error,
    reconcile_at = NULL,
    finished_at = now(),
    expires_at = greatest(k.expires_at, now() + k.retention_seconds * interval '1 second')
FROM held AS w
WHERE k.ctid = w.place AND k.tableoid IS NOT DISTINCT FROM w.part
RETURNING w.number, date_part('epoch', k.expires_at), date_part('epoch', now())
