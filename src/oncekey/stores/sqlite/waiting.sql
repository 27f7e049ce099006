-- What has waited too long: the oldest lease, the oldest unknown outcome of those counted, and those asked no more.
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
    )
