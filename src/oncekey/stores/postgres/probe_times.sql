-- How long the newest first attempts took, and how long their leases were. Keys that ended after their lease are left
-- out: a worker or the reconciler ended them, so their time is not a handler's.
SELECT
    k.operation,
    date_part('epoch', k.finished_at - k.created_at),
    date_part('epoch', k.lease_until - k.created_at)
FROM (
    SELECT n.* FROM idempotency_keys AS n
    WHERE n.state IN ('completed', 'failed') OR (n.state = 'failed_retryable' AND n.recovery_point IS NULL)
    ORDER BY n.expires_at DESC
    LIMIT %(limit)s
) AS k
WHERE
    k.attempt = 1 AND k.finished_at <= k.lease_until
