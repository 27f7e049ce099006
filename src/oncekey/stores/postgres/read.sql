SELECT {columns}
FROM unnest(%(scope)s, %(key)s) AS w (scope, key)
INNER JOIN idempotency_keys AS k ON k.scope = w.scope AND k.key = w.key
