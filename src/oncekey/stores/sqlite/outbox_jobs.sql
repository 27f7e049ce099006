-- Jobs in one state, oldest first. The state is written into the text, so that its partial index can be used.
SELECT {columns} FROM idempotency_outbox
WHERE {state}
ORDER BY {since} LIMIT ?1
