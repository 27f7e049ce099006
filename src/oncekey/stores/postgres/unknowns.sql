-- Unknown keys by operation, counted up to a limit; and for how many of them the last reconciler had no resolver.
SELECT k.operation, count(*), count(*) FILTER (WHERE k.last_error = %(no_resolver)s) FROM (
    SELECT operation, last_error FROM idempotency_keys WHERE state = 'unknown' LIMIT %(limit)s
) AS k
GROUP BY k.operation
ORDER BY count(*) DESC, k.operation COLLATE "C"
LIMIT %(operations)s
