-- The jobs of one key, oldest first. ?1, ?2 scope and key · ?3 limit
SELECT {columns} FROM idempotency_outbox
WHERE scope = ?1 AND key = ?2
ORDER BY created_at, id LIMIT ?3
