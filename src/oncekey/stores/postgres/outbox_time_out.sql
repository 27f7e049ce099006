-- Pending keys past their expiry fail for good, and the jobs that would have settled them are cancelled, in one commit.
-- If the job was tried, it may have happened, and the key becomes unknown instead. The job shows that when it is
-- cancelled: an operator's retry sets attempts to 0, but keeps the history.
-- A key whose job a worker runs under a live lease is skipped. So is a key whose job a worker claims at this moment.
-- A job is locked before its key, as in outbox_conclude.sql.
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
    RETURNING j.scope, j.key, j.key_owner, j.attempt > 0 OR j.history <> '[]' AS tried
),

free AS (
    SELECT c.scope, c.key, c.key_owner, c.tried FROM cancelled AS c
    UNION ALL
    SELECT
        l.scope, l.key, l.owner,
        EXISTS (
            SELECT FROM idempotency_outbox AS i
            WHERE
                i.scope = l.scope AND i.key = l.key AND i.key_owner = l.owner AND i.settles
                AND (i.attempt > 0 OR i.history <> '[]')
        )
    FROM late AS l
    WHERE NOT EXISTS (
        SELECT FROM idempotency_outbox AS i
        WHERE
            i.scope = l.scope AND i.key = l.key AND i.key_owner = l.owner AND i.settles
            AND i.state IN ('ready', 'running')
    )
)

UPDATE idempotency_keys AS k SET
    state = CASE WHEN f.tried THEN 'unknown' ELSE 'failed' END,
    response_status = CASE WHEN NOT f.tried THEN %(status)s::integer END,
    response_headers = CASE WHEN NOT f.tried THEN %(headers)s::text END,
    response_body = CASE WHEN NOT f.tried THEN %(body)s::bytea END,
    response_schema_version = CASE WHEN NOT f.tried THEN %(schema_version)s::integer END,
    last_error = CASE WHEN f.tried THEN {doubt} END,
    reconcile_at = CASE WHEN f.tried THEN now() END,
    lease_until = CASE WHEN f.tried THEN now() ELSE k.lease_until END,
    finished_at = CASE WHEN NOT f.tried THEN now() END,
    expires_at = CASE
        WHEN f.tried THEN k.expires_at
        ELSE greatest(k.expires_at, now() + k.retention_seconds * interval '1 second')
    END
FROM free AS f
WHERE
    k.scope = f.scope AND k.key = f.key AND k.state = 'pending' AND k.owner = f.key_owner AND k.expires_at <= now()
RETURNING k.scope, k.key
