-- Unknown keys by operation, counted up to a limit; and for how many of them the last reconciler had no resolver.
-- ?1 limit of keys · ?2 the reconciler's last_error for that · ?3 limit of operations
SELECT operation, count(*), count(CASE WHEN last_error = ?2 THEN 1 END) FROM (
    SELECT operation, last_error FROM idempotency_keys INDEXED BY idempotency_keys_unknowns
    WHERE state = 'unknown' LIMIT ?1
) GROUP BY operation ORDER BY count(*) DESC, operation LIMIT ?3
