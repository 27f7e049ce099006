-- What an owner needs to end its running job. No row: the owner no longer holds the job.
SELECT attempt, history, last_error, run_at, scope, key, key_owner, settles FROM idempotency_outbox
WHERE id = ?1 AND state = 'running' AND owner = ?2
