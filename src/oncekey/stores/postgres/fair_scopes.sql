-- The next scopes that have keys to ask about, and whether the oldest key of each is due: one probe of the index for
-- each scope, for any number of keys. The state comes from a subquery, so that the planner does not know its value.
-- Otherwise it would read, for every scope, the whole index that holds unknown keys by time alone.
WITH RECURSIVE visited AS (
    (
        SELECT k.scope, k.reconcile_at, 1 AS number FROM idempotency_keys AS k
        WHERE
            k.state IN ('unknown', 'failed_retryable') AND k.reconcile_at IS NOT NULL
            AND k.state = (SELECT %(state)s::text) AND k.scope > %(after)s
        ORDER BY k.scope, k.reconcile_at
        LIMIT 1
    )
    UNION ALL
    SELECT n.scope, n.reconcile_at, v.number + 1 FROM visited AS v
    CROSS JOIN LATERAL (
        SELECT k.scope, k.reconcile_at FROM idempotency_keys AS k
        WHERE
            k.state IN ('unknown', 'failed_retryable') AND k.reconcile_at IS NOT NULL
            AND k.state = (SELECT %(state)s::text) AND k.scope > v.scope
        ORDER BY k.scope, k.reconcile_at
        LIMIT 1
    ) AS n
    WHERE v.number < %(limit)s
)

SELECT v.scope, v.reconcile_at <= now() FROM visited AS v
ORDER BY v.number
