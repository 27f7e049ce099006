-- Unknown keys by operation, of those counted; and of how many the last reconciler had no resolver.
-- ?1 at most so many keys · ?2 what it then writes · ?3 at most so many operations
SELECT operation, count(*), count(CASE WHEN last_error = ?2 THEN 1 END) FROM (
    SELECT operation, last_error FROM idempotency_keys INDEXED BY idempotency_keys_unknowns
    WHERE state = 'unknown' LIMIT ?1
) GROUP BY operation ORDER BY count(*) DESC, operation LIMIT ?3
