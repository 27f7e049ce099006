-- What an owner needs to know of its running job in order to end it. No row: it is not its own any more.
SELECT attempt, history, last_error, run_at, scope, key, key_owner, settles FROM idempotency_outbox
WHERE id = ?1 AND state = 'running' AND owner = ?2
