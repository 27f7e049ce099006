-- Settle or time out a key, in the transaction that ends its job, if the key still is pending under the token of the
-- attempt that enqueued the job. ?1-?3 key and owner · ?4 now · ?5 state · ?6 error · ?7-?10 the response
UPDATE idempotency_keys SET
    state = ?5,
    last_error = CASE WHEN ?5 = 'unknown' THEN ?6 END,
    reconcile_at = CASE WHEN ?5 = 'unknown' THEN ?4 END,
    lease_until = CASE WHEN ?5 = 'unknown' THEN ?4 ELSE lease_until END,
    finished_at = CASE WHEN ?5 IN ('completed', 'failed') THEN ?4 END,
    expires_at = CASE
        WHEN ?5 IN ('completed', 'failed') THEN max(expires_at, ?4 + retention_seconds) ELSE expires_at
    END,
    response_status = ?7,
    response_headers = ?8,
    response_schema_version = ?9,
    response_body = ?10
WHERE scope = ?1 AND key = ?2 AND state = 'pending' AND owner = ?3
