-- The steps of one key, in the order in which they were first written.
SELECT name, kind, state, repeatable, result, downstream_key, provider_id
FROM idempotency_steps
WHERE scope = ? AND key = ?
ORDER BY rowid
