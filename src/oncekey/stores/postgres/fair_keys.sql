-- The oldest due keys of each of these scopes, up to a limit for each. The state: see fair_scopes.sql.
SELECT {columns} FROM unnest(%(scope)s) AS w (scope)
CROSS JOIN LATERAL (
    SELECT * FROM idempotency_keys AS i
    WHERE
        i.state IN ('unknown', 'failed_retryable') AND i.reconcile_at IS NOT NULL
        AND i.state = (SELECT %(state)s::text) AND i.scope = w.scope
        AND i.reconcile_at <= now()
    ORDER BY i.reconcile_at
    LIMIT %(limit)s
) AS k
