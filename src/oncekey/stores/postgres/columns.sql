-- The columns of a Record, in the order in which rows.py reads them; `k` is the row.
k.scope, k.key, k.operation, k.fingerprint, k.fingerprint_version, k.effects, k.state, k.attempt, k.owner,
date_part('epoch', k.lease_until), k.recovery_point,
k.response_status, k.response_headers, k.response_body, k.response_schema_version,
k.last_error, date_part('epoch', k.reconcile_at), k.reconcile_tries,
date_part('epoch', k.created_at), date_part('epoch', k.finished_at),
k.retention_seconds, date_part('epoch', k.expires_at), date_part('epoch', now()),
k.fingerprint_recipe, k.quarantine_seconds
