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
