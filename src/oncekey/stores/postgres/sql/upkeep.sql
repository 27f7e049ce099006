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

-- name: fair_keys
-- The oldest due keys of each of these scopes, up to a limit for each. The state: see fair_scopes.sql.
SELECT {columns} FROM unnest(%(scope)s) AS w (scope)
CROSS JOIN LATERAL (
    SELECT * FROM idempotency_keys AS i
    WHERE
        i.state IN ('unknown', 'failed_retryable') AND i.reconcile_at IS NOT NULL
        AND i.state = (SELECT %(state)s::text) AND i.scope = w.scope
        AND i.reconcile_at <= now()
    ORDER BY i.reconcile_at
    LIMIT %(limit)s
) AS k

-- name: fair_scopes
-- The next scopes that have keys to ask about, and whether the oldest key of each is due: one probe of the index for
-- each scope, for any number of keys. The state comes from a subquery, so that the planner does not know its value.
-- Otherwise it would read, for every scope, the whole index that holds unknown keys by time alone.
WITH RECURSIVE visited AS (
    (
        SELECT k.scope, k.reconcile_at, 1 AS number FROM idempotency_keys AS k
        WHERE
            k.state IN ('unknown', 'failed_retryable') AND k.reconcile_at IS NOT NULL
            AND k.state = (SELECT %(state)s::text) AND k.scope > %(after)s
        ORDER BY k.scope, k.reconcile_at
        LIMIT 1
    )
    UNION ALL
    SELECT n.scope, n.reconcile_at, v.number + 1 FROM visited AS v
    CROSS JOIN LATERAL (
        SELECT k.scope, k.reconcile_at FROM idempotency_keys AS k
        WHERE
            k.state IN ('unknown', 'failed_retryable') AND k.reconcile_at IS NOT NULL
            AND k.state = (SELECT %(state)s::text) AND k.scope > v.scope
        ORDER BY k.scope, k.reconcile_at
        LIMIT 1
    ) AS n
    WHERE v.number < %(limit)s
)

SELECT v.scope, v.reconcile_at <= now() FROM visited AS v
ORDER BY v.number

-- name: half_done
-- Half-done keys by operation that wait: no attempt for a while, and no try of upkeep.
SELECT k.operation, count(*), date_part('epoch', now() - min(k.lease_until)) FROM (
    SELECT operation, lease_until, reconcile_tries FROM idempotency_keys
    WHERE state = 'failed_retryable' AND recovery_point IS NOT NULL LIMIT %(limit)s
) AS k
WHERE k.reconcile_tries = 0 AND k.lease_until + %(waiting)s * interval '1 second' <= now()
GROUP BY k.operation
ORDER BY count(*) DESC, k.operation COLLATE "C"
LIMIT %(operations)s

-- name: purge
-- Delete final rows past their expiry, and expired rows that were kept for a second retention, with their steps, up to
-- a common limit. Rows in an open transaction are skipped. Place and part: see held.sql.
WITH keys_past AS (
    SELECT k.tableoid AS part, k.ctid AS place FROM idempotency_keys AS k
    WHERE
        (k.state IN ('completed', 'failed') OR (k.state = 'failed_retryable' AND k.recovery_point IS NULL))
        AND k.expires_at <= now()
    ORDER BY k.expires_at
    LIMIT CASE WHEN %(expired_state_only)s THEN 0 ELSE %(limit)s END
    FOR UPDATE SKIP LOCKED
),

in_state_expired AS (
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
    USING (SELECT * FROM keys_past UNION ALL SELECT * FROM in_state_expired) AS d
    WHERE k.ctid = d.place AND k.tableoid IS NOT DISTINCT FROM d.part
    RETURNING k.scope, k.key, true AS forgets
),

{forgotten}

SELECT count(*) FROM moved

-- name: unknowns
-- Unknown keys by operation, counted up to a limit; and for how many of them the last reconciler had no resolver.
SELECT k.operation, count(*), count(*) FILTER (WHERE starts_with(k.last_error, %(no_resolver)s)) FROM (
    SELECT operation, last_error FROM idempotency_keys WHERE state = 'unknown' LIMIT %(limit)s
) AS k
GROUP BY k.operation
ORDER BY count(*) DESC, k.operation COLLATE "C"
LIMIT %(operations)s

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
