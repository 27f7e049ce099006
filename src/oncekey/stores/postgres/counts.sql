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
