-- The columns of a Job, in the order in which stores/outbox_rows.py reads them; `j` is the row.
j.id, j.scope, j.key, j.key_owner, j.operation, j.task, j.payload, j.downstream_key, j.settles, j.state, j.attempt,
j.owner, date_part('epoch', j.lease_until), date_part('epoch', j.run_at), j.provider_id, j.last_error, j.history,
date_part('epoch', j.created_at), date_part('epoch', j.finished_at), date_part('epoch', now())
