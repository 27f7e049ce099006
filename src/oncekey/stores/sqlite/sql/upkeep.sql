-- What is due, what is over, and how much waits.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).

-- name: counts
-- Rows by state, each index counted up to ?1: a health check never reads the whole table.
SELECT 'in_progress', count(*) FROM (
    SELECT 1 FROM idempotency_keys INDEXED BY idempotency_keys_leases
    WHERE state = 'in_progress' LIMIT ?1
)
UNION ALL
SELECT 'pending', count(*) FROM (
    SELECT 1 FROM idempotency_keys INDEXED BY idempotency_keys_abandoned
    WHERE state = 'pending' LIMIT ?1
)
UNION ALL
SELECT 'unknown', count(*) FROM (
    SELECT 1 FROM idempotency_keys INDEXED BY idempotency_keys_unknowns
    WHERE state = 'unknown' LIMIT ?1
)
UNION ALL
SELECT 'failed_retryable', count(*) FROM (
    SELECT 1 FROM idempotency_keys INDEXED BY idempotency_keys_lapsed
    WHERE state = 'failed_retryable' AND recovery_point IS NOT NULL LIMIT ?1
)
UNION ALL
SELECT 'expired', count(*) FROM (
    SELECT 1 FROM idempotency_keys INDEXED BY idempotency_keys_tombstones
    WHERE state = 'expired' LIMIT ?1
)
UNION ALL
SELECT state, count(*) FROM (
    SELECT state FROM idempotency_keys INDEXED BY idempotency_keys_expired
    WHERE state IN ('completed', 'failed') OR (state = 'failed_retryable' AND recovery_point IS NULL) LIMIT ?1
) GROUP BY state

-- name: doomed_keys
-- The keys that the purge deletes, oldest first: final, or retryable without a step that is done, and past expiry.
-- Keys that are in flight, unknown or pending do not expire (hazard 11).
SELECT rowid, scope, key FROM idempotency_keys
WHERE (state IN ('completed', 'failed') OR (state = 'failed_retryable' AND recovery_point IS NULL))
  AND expires_at <= ?1
ORDER BY expires_at, scope, key LIMIT ?2

-- name: doomed_tombstones
-- The expired rows that the purge deletes, oldest first: they were kept for a second retention, for the audit.
SELECT rowid, scope, key FROM idempotency_keys
WHERE state = 'expired' AND expires_at + retention_seconds <= ?1
ORDER BY expires_at + retention_seconds, scope, key LIMIT ?2

-- name: due_abandoned
-- Duty "abandoned", oldest first: pending and past expiry, because no job has settled the key.
SELECT scope, key FROM idempotency_keys
WHERE state = 'pending' AND expires_at <= ?1
ORDER BY expires_at, scope, key LIMIT ?2

-- name: due_expired
-- Duty "expired", oldest first: final, or retryable without a step that is done, and past expiry.
SELECT scope, key FROM idempotency_keys
WHERE (state IN ('completed', 'failed') OR (state = 'failed_retryable' AND recovery_point IS NULL))
  AND expires_at <= ?1
ORDER BY expires_at, scope, key LIMIT ?2

-- name: due_lapsed
-- Duty "lapsed", oldest first: retryable with steps that are done, and past expiry. The client did not retry.
SELECT scope, key FROM idempotency_keys
WHERE state = 'failed_retryable' AND recovery_point IS NOT NULL AND expires_at <= ?1
ORDER BY expires_at, scope, key LIMIT ?2

-- name: due_leases
-- Duty "leases", oldest first: in progress, and the lease is over.
SELECT scope, key FROM idempotency_keys
WHERE state = 'in_progress' AND lease_until <= ?1
ORDER BY lease_until, scope, key LIMIT ?2

-- name: due_resumable
-- Duty "resumable", oldest first: half done, and the time to resume it has come.
SELECT scope, key FROM idempotency_keys
WHERE state = 'failed_retryable' AND reconcile_at IS NOT NULL AND reconcile_at <= ?1
ORDER BY reconcile_at, scope, key LIMIT ?2

-- name: due_unknowns
-- Duty "unknowns", oldest first: the outcome is unknown, and the time to reconcile it has come.
SELECT scope, key FROM idempotency_keys
WHERE state = 'unknown' AND reconcile_at <= ?1
ORDER BY reconcile_at, scope, key LIMIT ?2

-- name: fair_keys
-- The oldest due keys of one scope. ?1 the state · ?2 the scope · ?3 now · ?4 limit
SELECT k.scope, k.key FROM idempotency_keys AS k
WHERE k.state IN ('unknown', 'failed_retryable') AND k.reconcile_at IS NOT NULL
  AND k.state = ?1 AND k.scope = ?2 AND k.reconcile_at <= ?3
ORDER BY k.reconcile_at, k.key LIMIT ?4

-- name: fair_scopes
-- The next scopes that have keys to ask about, and the oldest time of each: one probe of the index for each scope, for
-- any number of keys. ?1 the state · ?2 only scopes after this one · ?3 limit
WITH RECURSIVE visited (scope, number) AS (
    SELECT (
        SELECT k.scope FROM idempotency_keys AS k
        WHERE k.state IN ('unknown', 'failed_retryable') AND k.reconcile_at IS NOT NULL
          AND k.state = ?1 AND k.scope > ?2
        ORDER BY k.scope LIMIT 1
    ), 1
    UNION ALL
    SELECT (
        SELECT k.scope FROM idempotency_keys AS k
        WHERE k.state IN ('unknown', 'failed_retryable') AND k.reconcile_at IS NOT NULL
          AND k.state = ?1 AND k.scope > v.scope
        ORDER BY k.scope LIMIT 1
    ), v.number + 1
    FROM visited AS v WHERE v.scope IS NOT NULL AND v.number < ?3
)
SELECT v.scope, (
    SELECT min(k.reconcile_at) FROM idempotency_keys AS k
    WHERE k.state IN ('unknown', 'failed_retryable') AND k.reconcile_at IS NOT NULL
      AND k.state = ?1 AND k.scope = v.scope
)
FROM visited AS v WHERE v.scope IS NOT NULL

-- name: half_done
-- Half-done keys by operation that wait: no attempt for a while, and no try of upkeep.
-- ?1 limit of keys · ?2 now · ?3 for how long they wait · ?4 limit of operations
SELECT operation, count(*), ?2 - min(lease_until) FROM (
    SELECT operation, lease_until, reconcile_tries FROM idempotency_keys INDEXED BY idempotency_keys_lapsed
    WHERE state = 'failed_retryable' AND recovery_point IS NOT NULL LIMIT ?1
) WHERE reconcile_tries = 0 AND lease_until + ?3 <= ?2
GROUP BY operation ORDER BY count(*) DESC, operation LIMIT ?4

-- name: purge
-- Delete one row that doomed_keys.sql or doomed_tombstones.sql has just listed, in the same transaction.
DELETE FROM idempotency_keys WHERE rowid = ?

-- name: unknowns
-- Unknown keys by operation, counted up to a limit; and for how many of them the last reconciler had no resolver.
-- ?1 limit of keys · ?2 the reconciler's last_error for that · ?3 limit of operations
SELECT operation, count(*), count(CASE WHEN substr(last_error, 1, length(?2)) = ?2 THEN 1 END) FROM (
    SELECT operation, last_error FROM idempotency_keys INDEXED BY idempotency_keys_unknowns
    WHERE state = 'unknown' LIMIT ?1
) GROUP BY operation ORDER BY count(*) DESC, operation LIMIT ?3

-- name: waiting
-- What has waited too long: the oldest lease, the oldest of the counted unknown outcomes, and the dead letters: unknown
-- outcomes and half-done requests after their last try.
SELECT
    (
        SELECT min(lease_until) FROM idempotency_keys INDEXED BY idempotency_keys_leases
        WHERE state = 'in_progress'
    ),
    (
        SELECT min(created_at) FROM (
            SELECT created_at FROM idempotency_keys INDEXED BY idempotency_keys_unknowns
            WHERE state = 'unknown' LIMIT ?1
        )
    ),
    (
        SELECT count(*) FROM (
            SELECT 1 FROM idempotency_keys INDEXED BY idempotency_keys_unknowns
            WHERE state = 'unknown' AND reconcile_at IS NULL LIMIT ?1
        )
    ) + (
        SELECT count(*) FROM (
            SELECT reconcile_at, reconcile_tries FROM idempotency_keys INDEXED BY idempotency_keys_lapsed
            WHERE state = 'failed_retryable' AND recovery_point IS NOT NULL LIMIT ?1
        ) WHERE reconcile_at IS NULL AND reconcile_tries > 0
    )
