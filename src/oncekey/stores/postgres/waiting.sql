-- What has waited too long: the oldest lease, the oldest unknown outcome of those counted, and those asked no more.
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
    )
