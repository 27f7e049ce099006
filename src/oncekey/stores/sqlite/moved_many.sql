-- Of rows that swap.sql just moved, the columns that the caller cannot know: the owner may have renewed or advanced.
SELECT k.scope, k.key, k.lease_until, k.recovery_point
FROM json_each(?1) AS w
CROSS JOIN idempotency_keys AS k
WHERE k.scope = json_extract(w.value, '$[0]') AND k.key = json_extract(w.value, '$[1]')
