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
