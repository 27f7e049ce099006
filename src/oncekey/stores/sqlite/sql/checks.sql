-- What `oncekey doctor` asks the database.
-- Each query has a name, and is read as `statement(package, name)` (stores/sql/queries.py).

-- name: probe_times
-- How long the newest first attempts took, and how long their leases were. Keys that ended after their lease are left
-- out: a worker or the reconciler ended them, so their time is not a handler's. ?1 limit
SELECT k.operation, k.finished_at - k.created_at, k.lease_until - k.created_at
FROM (
    SELECT scope, key, operation, attempt, created_at, finished_at, lease_until
    FROM idempotency_keys INDEXED BY idempotency_keys_expired
    WHERE state IN ('completed', 'failed') OR (state = 'failed_retryable' AND recovery_point IS NULL)
    ORDER BY expires_at DESC LIMIT ?1
) AS k
WHERE k.attempt = 1 AND k.finished_at <= k.lease_until
