-- The jobs of one key, oldest first.
SELECT {columns} FROM idempotency_outbox AS j
WHERE j.scope = %(scope)s AND j.key = %(key)s
ORDER BY j.created_at, j.id
LIMIT %(limit)s
