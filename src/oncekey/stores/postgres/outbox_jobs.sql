-- Jobs in one state, oldest first. The state is written into the text, so that its partial index can be used.
SELECT {columns} FROM idempotency_outbox AS j
WHERE j.state = '{state}'
ORDER BY j.{since}
LIMIT %(limit)s
