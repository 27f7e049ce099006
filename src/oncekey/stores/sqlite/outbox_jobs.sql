-- Jobs in one state, oldest first. The state is part of the text, so that SQLite can use its partial index.
SELECT {columns} FROM idempotency_outbox
WHERE {state}
ORDER BY {since} LIMIT ?1
