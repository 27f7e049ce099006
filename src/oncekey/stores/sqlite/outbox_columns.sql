-- The columns of a Job but its last, `now`, in the order in which stores/outbox_rows.py reads them.
id, scope, key, key_owner, operation, task, payload, downstream_key, settles, state, attempt, owner, lease_until, run_at,
       provider_id, last_error, history, created_at, finished_at
