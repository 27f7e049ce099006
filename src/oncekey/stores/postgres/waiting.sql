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
