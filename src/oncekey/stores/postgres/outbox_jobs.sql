-- Jobs in one state, oldest first. The state is part of the text, so that PostgreSQL can use its partial index.
SELECT {columns} FROM idempotency_outbox AS j
WHERE j.state = '{state}'
ORDER BY j.{since}
LIMIT %(limit)s
