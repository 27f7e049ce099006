-- The new values of a row, for a swap `w` that neither deletes it nor starts it over.
state = w.to_state,
owner = coalesce(w.new_owner, k.owner),
attempt = coalesce(w.attempt, k.attempt),
effects = coalesce(w.effects, k.effects),
lease_until = coalesce(now() + w.lease_seconds * interval '1 second', k.lease_until),
recovery_point = coalesce(w.recovery_point, k.recovery_point),
response_status = w.status,
response_headers = w.headers,
response_body = w.body,
response_schema_version = w.schema_version,
last_error = w.last_error,
reconcile_at = now() + w.reconcile_in * interval '1 second',
finished_at = CASE WHEN w.to_state IN ('completed', 'failed') THEN now() END,
expires_at = CASE
    WHEN w.to_state IN ('completed', 'failed') OR (w.from_state = 'unknown' AND w.to_state = 'failed_retryable')
        THEN greatest(k.expires_at, now() + k.retention_seconds * interval '1 second')
    ELSE k.expires_at
END
