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
