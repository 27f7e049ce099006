SELECT {columns}
FROM unnest(%(scope)s, %(key)s) AS w (scope, key)
CROSS JOIN LATERAL (
    SELECT * FROM idempotency_keys AS i WHERE i.scope = w.scope AND i.key = w.key OFFSET 0
) AS k
