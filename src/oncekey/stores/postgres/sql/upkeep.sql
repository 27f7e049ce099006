-- What is due, what is over, and how much waits.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).

-- name: counts
-- Rows by state, each index counted up to a limit: a health check never reads the whole table.
SELECT 'in_progress', count(*) FROM (
    SELECT 1 FROM idempotency_keys WHERE state = 'in_progress' LIMIT %(limit)s
) AS k
UNION ALL
SELECT 'pending', count(*) FROM (
    SELECT 1 FROM idempotency_keys WHERE state = 'pending' LIMIT %(limit)s
) AS k
UNION ALL
SELECT 'unknown', count(*) FROM (
    SELECT 1 FROM idempotency_keys WHERE state = 'unknown' LIMIT %(limit)s
) AS k
UNION ALL
SELECT 'failed_retryable', count(*) FROM (
    SELECT 1 FROM idempotency_keys
    WHERE state = 'failed_retryable' AND recovery_point IS NOT NULL LIMIT %(limit)s
) AS k
UNION ALL
SELECT 'expired', count(*) FROM (
    SELECT 1 FROM idempotency_keys WHERE state = 'expired' LIMIT %(limit)s
) AS k
UNION ALL
SELECT k.state, count(*) FROM (
    SELECT state FROM idempotency_keys
    WHERE state IN ('completed', 'failed') OR (state = 'failed_retryable' AND recovery_point IS NULL) LIMIT %(limit)s
) AS k GROUP BY k.state

-- name: due_abandoned
SELECT {columns} FROM idempotency_keys AS k
WHERE k.state = 'pending' AND k.expires_at <= now()
ORDER BY k.expires_at
LIMIT %(limit)s

-- name: due_expired
SELECT {columns} FROM idempotency_keys AS k
WHERE
    (k.state IN ('completed', 'failed') OR (k.state = 'failed_retryable' AND k.recovery_point IS NULL))
    AND k.expires_at <= now()
ORDER BY k.expires_at
LIMIT %(limit)s

-- name: due_lapsed
SELECT {columns} FROM idempotency_keys AS k
WHERE k.state = 'failed_retryable' AND k.recovery_point IS NOT NULL AND k.expires_at <= now()
ORDER BY k.expires_at
LIMIT %(limit)s

-- name: due_leases
SELECT {columns} FROM idempotency_keys AS k
WHERE k.state = 'in_progress' AND k.lease_until <= now()
ORDER BY k.lease_until
LIMIT %(limit)s

-- name: due_resumable
SELECT {columns} FROM idempotency_keys AS k
WHERE k.state = 'failed_retryable' AND k.reconcile_at IS NOT NULL AND k.reconcile_at <= now()
ORDER BY k.reconcile_at
LIMIT %(limit)s

-- name: due_unknowns
SELECT {columns} FROM idempotency_keys AS k
WHERE k.state = 'unknown' AND k.reconcile_at <= now()
ORDER BY k.reconcile_at
LIMIT %(limit)s

-- name: purge
-- Delete final rows past their expiry, and expired rows that were kept for a second retention, with their steps, up to
-- a common limit. Rows in an open transaction are skipped. Place and part: see held.sql.
WITH keys_past AS (
    SELECT k.tableoid AS part, k.ctid AS place FROM idempotency_keys AS k
    WHERE
        (k.state IN ('completed', 'failed') OR (k.state = 'failed_retryable' AND k.recovery_point IS NULL))
        AND k.expires_at <= now()
    ORDER BY k.expires_at
    LIMIT CASE WHEN %(tombstones_only)s THEN 0 ELSE %(limit)s END
    FOR UPDATE SKIP LOCKED
),

tombstones AS (
    SELECT k.tableoid AS part, k.ctid AS place FROM idempotency_keys AS k
    WHERE
        k.state = 'expired'
        AND (k.expires_at AT TIME ZONE 'UTC') + k.retention_seconds * interval '1 second' <= now() AT TIME ZONE 'UTC'
    ORDER BY (k.expires_at AT TIME ZONE 'UTC') + k.retention_seconds * interval '1 second'
    LIMIT %(limit)s - (SELECT count(*) FROM keys_past)
    FOR UPDATE SKIP LOCKED
),

moved AS (
    DELETE FROM idempotency_keys AS k
    USING (SELECT * FROM keys_past UNION ALL SELECT * FROM tombstones) AS d
    WHERE k.ctid = d.place AND k.tableoid IS NOT DISTINCT FROM d.part
    RETURNING k.scope, k.key, true AS forgets
),

{forgotten}

SELECT count(*) FROM moved

-- name: waiting
-- What has waited too long: the oldest lease, the oldest of the counted unknown outcomes, and the dead letters: unknown
-- outcomes and half-done requests after their last try.
SELECT
    (
        SELECT date_part('epoch', now() - min(lease_until)) FROM idempotency_keys
        WHERE state = 'in_progress'
    ),
    (
        SELECT date_part('epoch', now() - min(k.created_at)) FROM (
            SELECT created_at FROM idempotency_keys WHERE state = 'unknown' LIMIT %(limit)s
        ) AS k
    ),
    (
        SELECT count(*) FROM (
            SELECT 1 FROM idempotency_keys WHERE state = 'unknown' AND reconcile_at IS NULL LIMIT %(limit)s
        ) AS k
    ) + (
        SELECT count(*) FROM (
            SELECT reconcile_at, reconcile_tries FROM idempotency_keys
            WHERE state = 'failed_retryable' AND recovery_point IS NOT NULL LIMIT %(limit)s
        ) AS k
        WHERE k.reconcile_at IS NULL AND k.reconcile_tries > 0
    )
