-- Pending keys past their expiry fail for good, and the jobs that would have settled them are cancelled, in one commit.
-- Never one whose job a worker is running under a live lease. A job is locked before its key, as in outbox_conclude.sql.
-- A job that a worker claims at this very moment is skipped or no longer as it was, and so its key is left alone.
WITH late AS (
    SELECT k.scope, k.key, k.owner FROM idempotency_keys AS k
    WHERE
        k.state = 'pending' AND k.expires_at <= now()
        AND NOT EXISTS (
            SELECT FROM idempotency_outbox AS i
            WHERE
                i.scope = k.scope AND i.key = k.key AND i.key_owner = k.owner AND i.settles
                AND i.state = 'running' AND i.lease_until > now()
        )
    ORDER BY k.expires_at
    LIMIT %(limit)s
),

held AS (
    SELECT j.id
    FROM late AS l
    CROSS JOIN LATERAL (
        SELECT i.id FROM idempotency_outbox AS i
        WHERE
            i.scope = l.scope AND i.key = l.key AND i.key_owner = l.owner AND i.settles
            AND (i.state = 'ready' OR (i.state = 'running' AND i.lease_until <= now()))
        OFFSET 0
        FOR NO KEY UPDATE SKIP LOCKED
    ) AS j
),

cancelled AS (
    UPDATE idempotency_outbox AS j SET
        state = 'cancelled', lease_until = NULL, last_error = {error}, finished_at = now()
    FROM held AS h
    WHERE j.id = h.id AND (j.state = 'ready' OR (j.state = 'running' AND j.lease_until <= now()))
    RETURNING j.scope, j.key, j.key_owner
),

free AS (
    SELECT c.scope, c.key, c.key_owner FROM cancelled AS c
    UNION
    SELECT l.scope, l.key, l.owner FROM late AS l
    WHERE NOT EXISTS (
        SELECT FROM idempotency_outbox AS i
        WHERE
            i.scope = l.scope AND i.key = l.key AND i.key_owner = l.owner AND i.settles
            AND i.state IN ('ready', 'running')
    )
)

UPDATE idempotency_keys AS k SET
    state = 'failed',
    response_status = %(status)s,
    response_headers = %(headers)s,
    response_body = %(body)s,
    response_schema_version = %(schema_version)s,
    last_error = NULL,
    finished_at = now(),
    expires_at = greatest(k.expires_at, now() + k.retention_seconds * interval '1 second')
FROM free AS f
WHERE
    k.scope = f.scope AND k.key = f.key AND k.state = 'pending' AND k.owner = f.key_owner AND k.expires_at <= now()
RETURNING k.scope, k.key
